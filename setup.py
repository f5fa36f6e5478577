"""Package metadata: what rlmegatron needs and in which range, with extras for GPU, CPU, tests and trackers.

In: the package's own `__version__`. Out: an installable package with its data files. Must never import the package.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

INIT = Path(__file__).parent / "rlmegatron" / "__init__.py"
VERSION = re.search(r'^__version__ = "(.+)"', INIT.read_text(), re.MULTILINE)
assert VERSION is not None, f"{INIT} states no __version__"

REQUIREMENTS = [
    "aiohttp>=3.10",
    # 0.17 and later need Python 3.12; pip picks what fits the interpreter.
    "megatron-core>=0.16.1,<0.20",
    "numpy>=2.0",
    "orjson>=3.10",
    "packaging>=24.2",
    "psutil>=6.0",
    "pyarrow>=18.0",
    "pydantic>=2.12,<3",
    "PyYAML>=6.0",
    "rich>=13.9",
    "safetensors>=0.5",
    "tensorboard>=2.18",
    "torch>=2.13,<2.15",
    "tqdm>=4.66",
    "transformers>=5.12,<6",
]

# What SGLang imports on a CPU. `sglang` and `torchvision` are not here: their own requirements are those of a GPU
# (gigabytes of kernels), so launch/environment.sh installs the two without them.
CPU = [
    "IPython",
    "apache-tvm-ffi",
    "compressed-tensors",
    "dill",
    "distro",
    "einops",
    "fastapi",
    "gguf",
    "interegular",
    "jsonschema",
    "loguru",
    "msgspec",
    "openai",
    "partial-json-parser",
    "pillow",
    "prometheus-client>=0.20.0",
    "pybase64",
    "python-multipart",
    "pyzmq>=25.1.2",
    "regex",
    "requests",
    "scipy",
    "sentencepiece",
    "setproctitle",
    "soundfile",
    "triton",
    "uvicorn",
    "uvloop",
    "watchfiles",
    "xgrammar",
    "xxhash",
    "zstandard",
]

GPU = [
    "sglang>=0.5.21,<0.6",
    # Transformer Engine's torch part is compiled on the machine: install it with --no-build-isolation.
    "transformer-engine[pytorch,core_cu13]>=2.9",
]

TEST = [
    "hypothesis>=6.100",
    "mypy>=1.18",
    "pytest>=8.4",
    "pytest-timeout>=2.3",
    "ruff>=0.14",
    "types-PyYAML",
]

setup(
    name="rlmegatron",
    version=VERSION[1],
    description="A multi-controller SPMD trainer for reinforcement learning of large language models, "
    "on Megatron-Core and SGLang",
    python_requires=">=3.11",
    packages=find_packages(include=["rlmegatron", "rlmegatron.*"]),
    include_package_data=True,
    # The stand-ins are put on an engine's path as plain files; they are no packages of this one.
    package_data={"rlmegatron": ["platform/sglang_site/**/*.py"]},
    install_requires=REQUIREMENTS,
    extras_require={
        "cpu": CPU,
        "gpu": GPU,
        "mlflow": ["mlflow-skinny>=2.20"],
        "test": TEST,
        "wandb": ["wandb>=0.19"],
    },
    zip_safe=False,
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
