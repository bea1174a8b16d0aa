"""Builds mmagx, Mesa's compiler for Apple's G13 and G14 GPUs (M1, M2) as a program: `make agx`.

Debian's source package of Mesa, from the mirror that this machine's apt has, and meson, ninja,
mako, pyyaml and packaging from pip, all in build/agx; no root, no LLVM: of Mesa only the reader of
SPIR-V, NIR and the compiler of the Asahi driver are compiled, in 81 s on two cores; 0.5 GiB.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "build" / "agx"
PROGRAM = FOLDER / "mmagx"
_RELEASE, _VERSION, _SUITE = "25.0.7", "25.0.7-2+deb13u1", "trixie"
_TOOLS = ("meson", "ninja", "mako", "pyyaml", "packaging")
_OFF = "llvm zstd xmlconfig libunwind lmsensors valgrind expat zlib shader-cache glx egl gbm"
_OFF += " gles1 gles2 gallium-va gallium-vdpau"
_KEY = "/usr/share/keyrings/debian-archive-keyring.gpg"
_DRIVER = """
idep_libagx = declare_dependency(include_directories : include_directories('asahi/agxstub'))
subdir('asahi/compiler')
executable('mmagx', ['asahi/compiler/mmagx.c'], link_with : [libasahi_compiler],
  include_directories : [inc_include, inc_src], c_args : [pre_args, no_override_init_args],
  dependencies : [idep_vtn, idep_nir, idep_mesautil])
"""


def _mirror() -> str:
    """Debian's mirror of this machine's apt. OSError: it has none."""
    lists = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    text = "\n".join(file.read_text() for file in lists if file.is_file())
    if found := re.search(r"^(?:deb|URIs:).*?(https?://\S+/debian)/?\s", text + "\n", re.M):
        return found[1]
    raise OSError("apt has no mirror of Debian; Mesa's source package comes from one")


def fetch(folder: Path) -> Path:
    """Mesa's sources, unpacked in `folder`; those that are there are taken."""
    sources = folder / f"mesa-{_RELEASE}"
    if sources.exists():
        return sources
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / "apt" / name).mkdir(parents=True, exist_ok=True)
    listed = folder / "apt" / "sources.list"
    listed.write_text(f"deb-src [signed-by={_KEY}] {_mirror()} {_SUITE} main\n")
    places = {
        "Dir::Etc::sourcelist": listed,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": folder / "apt" / "lists",
        "Dir::Cache": folder / "apt" / "cache",
    }
    options = [part for name, value in places.items() for part in ("-o", f"{name}={value}")]
    subprocess.run(["apt-get", *options, "update"], check=True)
    get = ["apt-get", *options, "source", "--download-only", f"mesa={_VERSION}"]
    subprocess.run(get, check=True, cwd=folder)
    new = folder / "unpacked"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    archive = folder / f"mesa_{_RELEASE}.orig.tar.xz"
    subprocess.run(["tar", "xf", archive, "-C", new, "--strip-components=1"], check=True)
    _change(new)
    return new.rename(sources)


def _replace(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    if text.count(before) != 1:
        raise OSError(f"{file}: {before!r} is there {text.count(before)} times, not once")
    file.write_text(text.replace(before, after))


def _change(mesa: Path) -> None:
    """Writes our additions into Mesa's sources."""
    compiler = mesa / "src" / "asahi" / "compiler"
    # Mesa makes four general exchanges and selects of simd_shuffle_xor by a constant, for which
    # the machine has an instruction: that is taken.
    lowering = compiler / "agx_nir_lower_subgroups.c"
    text = lowering.read_text()
    at = text.index("nir_instr_as_intrinsic(instr);", text.index("lower_subgroup_filter(const"))
    at = text.index("\n", at)
    kept = """
   if (intr->intrinsic == nir_intrinsic_shuffle_xor && intr->def.bit_size <= 32 &&
       intr->def.bit_size >= 16 && intr->def.num_components == 1 &&
       nir_src_is_const(intr->src[1]))
      return false;
"""
    lowering.write_text(text[:at] + kept + text[at:])
    case = "   case nir_intrinsic_quad_broadcast: {"
    exchange = """   case nir_intrinsic_shuffle_xor:
      return agx_shuffle_xor_to(b, dst, agx_src_index(&instr->src[0]),
                                agx_immediate(nir_src_as_uint(instr->src[1])));

"""
    _replace(compiler / "agx_compile.c", case, exchange + case)
    # Loads and stores of threadgroup memory have a constant of 16 bits beside the address, which
    # Mesa encodes but leaves 0.
    emitted = compiler / "agx_compile.c"
    text = emitted.read_text()
    before = "agx_index index = agx_zero(); /* TODO: optimize address arithmetic */"
    if text.count(before) != 2:
        raise OSError(f"{emitted}: {before!r} is not there twice")
    after = "agx_index index = agx_immediate(nir_intrinsic_base(instr));"
    emitted.write_text(text.replace(before, after))
    wide = "(I->op == AGX_OPCODE_DEVICE_STORE) ||"
    local = "".join(f" (I->op == AGX_OPCODE_LOCAL_{op}) ||" for op in ("LOAD", "STORE"))
    _replace(compiler / "agx_ir.c", wide, wide + local)
    # The functions that Mesa compiles from OpenCL C, by LLVM, serve textures and drawing.
    names: set[str] = set()
    for file in compiler.glob("*.c"):
        text = file.read_text()
        own = re.findall(r"^(libagx_\w+)\(", text, re.M)
        names |= set(re.findall(r"\b(libagx_\w+)\s*\(", text)) - set(own)
    stubs = mesa / "src" / "asahi" / "agxstub"
    stubs.mkdir()
    functions = "".join(
        f"static inline void *{name}(void *b, ...) {{ abort(); }}\n" for name in sorted(names)
    )
    (stubs / "libagx.h").write_text(f"#pragma once\n#include <stdlib.h>\n{functions}")
    with (mesa / "src" / "meson.build").open("a") as file:
        file.write(_DRIVER)


def build(folder: Path = FOLDER) -> Path:
    """The program, made anew if the driver changed. CalledProcessError: what failed said it."""
    folder.mkdir(parents=True, exist_ok=True)
    mesa = fetch(folder)
    shutil.copy(HERE / "mmagx.c", mesa / "src" / "asahi" / "compiler" / "mmagx.c")
    tools = folder / "venv" / "bin"
    if not (tools / "meson").exists():
        venv.create(folder / "venv", with_pip=True)
        subprocess.run([tools / "python", "-m", "pip", "-q", "install", *_TOOLS], check=True)
    made = folder / "objects"
    if not (made / "build.ninja").exists():
        options = [f"-D{name}=disabled" for name in _OFF.split()]
        options += [f"-D{name}=" for name in ("gallium-drivers", "vulkan-drivers", "platforms")]
        options += ["-Dvideo-codecs=", "-Dopengl=false", "-Dbuildtype=release", "-Db_ndebug=false"]
        setup = [tools / "meson", "setup", made, mesa, "-Dbuild-tests=false", *options]
        environment = {"PATH": f"{tools}:/usr/local/bin:/usr/bin:/bin"}
        subprocess.run(setup, check=True, env=environment)
    subprocess.run([tools / "ninja", "-C", made, "src/mmagx"], check=True)
    return Path(shutil.copy(made / "src" / "mmagx", folder / PROGRAM.name))


if __name__ == "__main__":
    print(build())
    sys.exit(0)
