// Decodes text with a sparse GPT: the product with a sparse matrix (product.h), and all blocks for one token (block.h).
#include "block.h"

EXPORTED int sm_has_narrow() { return HAS_NARROW; }
EXPORTED int sm_multiply(const Call* c) {
    switch (c->dtype) {
        case 0: multiply<float>(*c); return 0;
        case 1: multiply<bfloat>(*c); return 0;
    }
    return 1;
}
EXPORTED void sm_step(const Step* s) { step(*s); }
