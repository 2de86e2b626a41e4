"""Spack's recipe, for Spack 1.0 or newer. It builds the repository it lies in."""

import pathlib

from spack_repo.builtin.build_systems.cmake import CMakePackage

from spack.package import *


class Tessera(CMakePackage):
    """Composable distributed training for C++ on libtorch."""

    git = pathlib.Path(__file__).resolve().parents[4].as_uri()
    license("BSD-3-Clause")

    version("main", branch="main")

    variant("cuda", default=False, description="Build against a libtorch with CUDA")

    depends_on("cxx", type="build")
    depends_on("cmake@3.25:", type="build")
    depends_on("python", type="build")
    depends_on("cli11", type="build")
    depends_on("nlohmann-json", type="build")
    depends_on("tomlplusplus", type="build")
    depends_on("py-torch@2.11:2.15 +distributed+gloo", type=("build", "link", "run"))
    depends_on("py-torch +cuda+nccl", when="+cuda")
    depends_on("py-torch ~cuda", when="~cuda")
    conflicts("%gcc@:11", msg="Tessera needs g++ 12 or newer")
    conflicts("target=aarch64:", msg="Tessera is for x86-64")

    def cmake_args(self):
        platlib = self.spec["python"].package.platlib  # relative to a prefix
        return [
            self.define("TESSERA_TORCH", join_path(self.spec["py-torch"].prefix, platlib, "torch")),
            self.define("TESSERA_BUILD_TESTS", False),
            self.define("TESSERA_BUILD_EXAMPLES", False),
            self.define_from_variant("TESSERA_REQUIRE_CUDA", "cuda"),
        ]
