from mst_scale.randomness import counter_hash, mix64


def test_the_same_on_every_platform():
    """Frozen values: a change would reorder the samples of every run that resumes."""
    assert counter_hash(0) == 10451216379200822465
    assert counter_hash(1337, "train", 7, 3) == 3598027233106061212


def test_order_names_and_boundaries_matter():
    values = [
        counter_hash(1, 2), counter_hash(2, 1), counter_hash("ab", "c"), counter_hash("a", "bc"), counter_hash("abc"),
        counter_hash(1), counter_hash(1, 0), counter_hash(-1), counter_hash(2**63),
    ]  # fmt: skip
    assert len(set(values)) == len(values)


def test_mix64_is_a_bijection_that_scatters_bits():
    # 4096 distinct inputs give distinct outputs, and flipping one input bit flips 32 ± 4 of 64 output bits on average
    assert len({mix64(x) for x in range(4096)}) == 4096
    flips = [bin(mix64(x) ^ mix64(x ^ (1 << bit))).count("1") for x in range(64) for bit in range(64)]
    assert 28 < sum(flips) / len(flips) < 36
