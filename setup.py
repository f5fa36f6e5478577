"""Package metadata, with extras for GPU, CPU, tests and trackers, and the build of the libraries that copy weights.

In: the package's own `__version__` and the sources in its csrc/. Out: an installable package with its data files and,
where compilers are found, those libraries; one that does not build is warned about and left out, and torch does its
work. Must never import the package.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

INIT = Path(__file__).parent / "rlmegatron" / "__init__.py"
VERSION = re.search(r'^__version__ = "(.+)"', INIT.read_text(), re.MULTILINE)
assert VERSION is not None, f"{INIT} states no __version__"

REQUIREMENTS = [
    "aiohttp>=3.10",
    # 0.17 and later need Python 3.12; pip picks what fits the interpreter.
    "megatron-core>=0.16.1,<0.20",
    "numpy>=2.0",
    "orjson>=3.10",
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
    "pytest-xdist>=3.6",
    "ruff>=0.14",
    "types-PyYAML",
]

CSRC = "rlmegatron/weight_sync/csrc"
# Compute capabilities of the A100, the H100 and H200, and the B200.
CUDA_TARGETS = ["80", "90", "100"]


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler, as the environment names it or under its usual names."""
    named = shlex.split(os.environ.get("CXX", ""))
    candidates = [named] if named else [["c++"], ["g++"], ["clang++"]]
    return next((command for command in candidates if shutil.which(command[0])), None)


def find_nvcc() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return shutil.which("nvcc", path=os.pathsep.join([*(f"{home}/bin" for home in homes), os.environ.get("PATH", "")]))


def cuda_targets(nvcc: str) -> list[str]:
    """nvcc's options for those of our targets that it knows, with code that later devices can translate."""
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    targets = [target for target in CUDA_TARGETS if f"compute_{target}" in known]
    if not targets:
        raise CompileError(f"{nvcc} knows none of compute_{', compute_'.join(CUDA_TARGETS)}")
    newest = targets[-1]
    return [
        *(f"--generate-code=arch=compute_{target},code=sm_{target}" for target in targets),
        f"--generate-code=arch=compute_{newest},code=compute_{newest}",
    ]


def cpu_command(source: str, output: str) -> list[str]:
    compiler = find_compiler()
    if compiler is None:
        raise CompileError("no C++ compiler found; name one with CXX")
    return [*compiler, "-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", source, "-o", output]


def cuda_command(source: str, output: str) -> list[str]:
    nvcc = find_nvcc()
    assert nvcc is not None, "the CUDA part is only built where nvcc was found"
    options = ["-O3", "-std=c++17", "--shared", "-Xcompiler=-fPIC", "--cudart=static", "--threads=0"]
    return [nvcc, *options, *cuda_targets(nvcc), source, "-o", output]


class BuildLibraries(build_ext):
    """Builds plain shared libraries: they hold no Python module, and are loaded with ctypes."""

    def run(self) -> None:
        # One that does not build must not leave the last one in its place; a new file, because overwriting a library
        # ends the processes that have loaded it.
        for extension in self.extensions:
            name = self.get_ext_filename(extension.name)
            for path in [Path(self.build_lib, name), *([Path(name)] if self.inplace else [])]:
                path.unlink(missing_ok=True)
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        output = self.get_ext_fullpath(ext.name)
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        command = cuda_command if ext.name.endswith("cuda") else cpu_command
        try:
            subprocess.run(command(ext.sources[0], output), check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"{ext.sources[0]}: {error}") from error


def libraries() -> list[Extension]:
    sources = {"cpu": "copy_segments.cpp"} | ({"cuda": "copy_segments.cu"} if find_nvcc() else {})
    package = CSRC.replace("/", ".")
    return [
        Extension(
            f"{package}.libcopy_segments_{name}", [f"{CSRC}/{source}"], depends=[f"{CSRC}/segments.h"], optional=True
        )
        for name, source in sources.items()
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
    package_data={"rlmegatron": ["platform/sglang_site/**/*.py", "weight_sync/csrc/*.[ch]*"]},
    ext_modules=libraries(),
    cmdclass={"build_ext": BuildLibraries},
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
