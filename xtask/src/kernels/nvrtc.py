"""Compiles the CUDA kernels with NVRTC and packs a fatbin. Called by `cargo xtask kernels` in the folder of all.cu.

Usage: nvrtc.py TOOLKIT OUT FLAG...

TOOLKIT is the folder that pip installed NVRTC and nvFatbin to. For each architecture ARCH of CUBINS, OUT gets ARCH.cubin and
ARCH.log (what NVRTC and ptxas print), then kernels.fatbin gets the cubins and the PTX of PTX_ARCH. A failed compilation leaves its log
and exits with 1.

NVRTC loads no file of a toolkit, so its output depends on the sources, the flags and its release only.
"""

import ctypes
import multiprocessing
import pathlib
import sys

CUBINS = ["sm_80", "sm_90a"]
# For compute capabilities that none of the cubins serves: the driver compiles it. Must be one of CUBINS.
PTX_ARCH = "sm_80"
SOURCE = "all.cu"


def library(toolkit, name):
    return ctypes.CDLL(str(toolkit / "nvidia" / name))


def check(status, call):
    if status != 0:
        raise SystemExit(f"error: {call} returned {status}")


def strings(texts):
    return (ctypes.c_char_p * len(texts))(*[text.encode() for text in texts])


def read(nvrtc, program, what):
    """The bytes of nvrtcGetWHAT."""
    size = ctypes.c_size_t()
    check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    text = ctypes.create_string_buffer(size.value)
    check(getattr(nvrtc, f"nvrtcGet{what}")(program, text), f"nvrtcGet{what}")
    return text.raw


def compile_for(job):
    """Writes ARCH.log, and ARCH.cubin and ARCH.ptx if the sources compile. Returns whether they do."""
    toolkit, out, arch, flags = job
    nvrtc = library(toolkit, "cuda_nvrtc/lib/libnvrtc.so.12")
    program = ctypes.c_void_p()
    source = pathlib.Path(SOURCE).read_bytes()
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.encode(), 0, None, None)
    check(created, "nvrtcCreateProgram")
    options = [f"-arch={arch}", *flags]
    status = nvrtc.nvrtcCompileProgram(program, len(options), strings(options))
    (out / f"{arch}.log").write_bytes(read(nvrtc, program, "ProgramLog").rstrip(b"\0"))
    if status != 0:
        return False
    (out / f"{arch}.cubin").write_bytes(read(nvrtc, program, "CUBIN"))
    (out / f"{arch}.ptx").write_bytes(read(nvrtc, program, "PTX"))
    return True


def pack(toolkit, out):
    nvfatbin = library(toolkit, "nvfatbin/lib/libnvfatbin.so.12")
    handle = ctypes.c_void_p()
    options = ["-64", "-host=linux", "-compress-all"]
    check(nvfatbin.nvFatbinCreate(ctypes.byref(handle), strings(options), ctypes.c_size_t(len(options))), "nvFatbinCreate")
    # nvFatbin refers to the images until nvFatbinGet.
    images = []
    for arch in CUBINS:
        image = (out / f"{arch}.cubin").read_bytes()
        images.append(image)
        number = arch.removeprefix("sm_").encode()
        added = nvfatbin.nvFatbinAddCubin(handle, image, ctypes.c_size_t(len(image)), number, SOURCE.encode())
        check(added, "nvFatbinAddCubin")
    ptx = (out / f"{PTX_ARCH}.ptx").read_bytes()
    number = PTX_ARCH.removeprefix("sm_").encode()
    added = nvfatbin.nvFatbinAddPTX(handle, ptx, ctypes.c_size_t(len(ptx)), number, SOURCE.encode(), b"")
    check(added, "nvFatbinAddPTX")
    size = ctypes.c_size_t()
    check(nvfatbin.nvFatbinSize(handle, ctypes.byref(size)), "nvFatbinSize")
    fatbin = ctypes.create_string_buffer(size.value)
    check(nvfatbin.nvFatbinGet(handle, fatbin), "nvFatbinGet")
    (out / "kernels.fatbin").write_bytes(fatbin.raw)


def main():
    toolkit, out, flags = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
    with multiprocessing.Pool(len(CUBINS)) as pool:
        good = pool.map(compile_for, [(toolkit, out, arch, flags) for arch in CUBINS], chunksize=1)
    if not all(good):
        sys.exit(1)
    pack(toolkit, out)


if __name__ == "__main__":
    main()
