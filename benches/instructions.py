"""What the compiler makes of a kernel: the instructions of each of its loops, innermost first.

Usage: instructions.py NVRTC NVDISASM SOURCE ELEMENT KERNEL

NVRTC is libnvrtc.so and NVDISASM the disassembler, as the Python packages nvidia-cuda-nvrtc and nvidia-cuda-nvdisasm have them. SOURCE is
a file of crates/cuda/kernels, ELEMENT float, Bf16 or F16. It is compiled as the program does, but in one thread, for sm_90; no GPU is
needed. A loop's instructions are all between its first and its last, of which some may be jumped over, and another loop's within are made
more than once.
"""

import collections
import ctypes
import pathlib
import re
import subprocess
import sys
import tempfile

KERNELS = pathlib.Path(__file__).parent.parent / "crates/cuda/kernels"


def strings(texts):
    return (ctypes.c_char_p * len(texts))(*texts)


def compiled(nvrtc, source, element):
    """The machine code of all kernels of a file."""
    library = ctypes.CDLL(nvrtc)
    headers = sorted(KERNELS.glob("*.cuh"))
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(
        ctypes.byref(program),
        (KERNELS / source).read_bytes(),
        source.encode(),
        len(headers),
        strings([header.read_bytes() for header in headers]),
        strings([header.name.encode() for header in headers]),
    )
    options = ["--gpu-architecture=sm_90", "--std=c++17", "--fmad=false", f"-DELEMENT={element}"]
    failed = library.nvrtcCompileProgram(program, len(options), strings([option.encode() for option in options]))

    def result(what):
        size = ctypes.c_size_t()
        getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        result = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{what}")(program, result)
        return result.raw

    if failed:
        sys.exit(result("ProgramLog").decode())
    return result("CUBIN")


def loops(listing, kernel):
    """The instructions of each loop of a kernel, in a disassembler's listing."""
    start = listing.index(f".text.{kernel}:")
    end = listing.find("//--------------------- .text", start)
    instructions, labels = [], {}
    for line in listing[start : end if end > 0 else None].splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    for last, instruction in enumerate(instructions):
        target = re.search(r"\bBRA\b.*?(\.L\w+)", instruction)
        first = labels.get(target[1]) if target else None
        if first is not None and first < last:
            yield instructions[first : last + 1]


def name(instruction):
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]


def main():
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    nvrtc, nvdisasm, source, element, kernel = sys.argv[1:]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as code:
        code.write(compiled(nvrtc, source, element))
        code.flush()
        listing = subprocess.run([nvdisasm, "-c", code.name], capture_output=True, text=True, check=True).stdout
    for loop in sorted(loops(listing, kernel), key=len):
        most = collections.Counter(map(name, loop)).most_common(8)
        print(len(loop), " ".join(f"{name}:{count}" for name, count in most))


main()
