"""Names the packages and builds the Cython extensions; everything else stands in pyproject.toml."""

import os
import sys
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

ROOT = Path(__file__).parent
THREADED = ("_few_rows",) if sys.platform == "linux" else ()
"""Extensions that share torch's threads: at run time their OpenMP library is the one that torch has loaded before."""


def extension(source: Path) -> Extension:
    """One extension module for one .pyx file, named after its place in the package."""
    relative = source.relative_to(ROOT).with_suffix("")
    openmp = ["-fopenmp"] if source.stem in THREADED else []
    return Extension(
        ".".join(relative.parts),
        [str(source.relative_to(ROOT))],
        include_dirs=[numpy.get_include(), str(source.parent)],
        depends=[str(header.relative_to(ROOT)) for header in source.parent.glob("*.h")],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
        extra_compile_args=["-O3", "-g0", *openmp],
        extra_link_args=openmp,
    )


class BuildExtensions(build_ext):
    """Builds what wants OpenMP without it where the compiler has none; nobody asks for that extension then."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CompileError, LinkError):
            if "-fopenmp" not in ext.extra_compile_args:
                raise
            ext.extra_compile_args.remove("-fopenmp")
            ext.extra_link_args = []
            super().build_extension(ext)


if __name__ == "__main__":  # where processes are not forked, each of cythonize's imports this file
    setup(
        cmdclass={"build_ext": BuildExtensions},
        packages=[*find_packages(include=["ftk*", "ftk_cli*"]), "ftk.recipes"],
        package_dir={"ftk.recipes": "configs"},  # in a checkout the recipes are a folder of their own
        package_data={"ftk.recipes": ["*.yaml", "*/*.yaml"]},
        ext_modules=cythonize(
            [extension(source) for source in sorted(ROOT.glob("ftk/**/*.pyx"))],
            build_dir="build/cython",  # keeps the generated C out of the package
            nthreads=os.cpu_count() or 1,  # processes; the compiler's are those of `build_ext -j`
            compiler_directives={"language_level": "3", "boundscheck": False, "wraparound": False, "cdivision": True},
        ),
    )
