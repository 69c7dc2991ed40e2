//! The numbers of CUresult that a machine's state, a GPU's fault or a capture can bring about: what they mean, and what to do.

const OF_OURS: &str = "this is a mistake of this program: please report it with these lines";
const WHICH_KERNEL: &str = "the GPU is lost to this process; with --debug-sync (a program's own: DebugSync::Yes) all work is waited for, and the error names it";
const NOT_IN_CAPTURE: &str = "a step that is captured may only launch, copy inside of the GPU and wait for events: allocate, load and read before or after it";

/// The code of memory that there isn't.
pub(crate) const OUT_OF_MEMORY: i32 = 2;
/// The code of work that isn't done yet, which is no failure.
pub(crate) const NOT_READY: i32 = 600;

/// Whether a GPU that has met it is at fault itself: its memory, or its links to others.
pub(crate) const fn is_fault(code: i32) -> bool {
    matches!(code, 214 | 220)
}

/// What a code means and what to do about it.
pub(crate) const fn meaning(code: i32) -> Option<(&'static str, &'static str)> {
    Some(match code {
        1 => ("a value that the call doesn't take", OF_OURS),
        OUT_OF_MEMORY => ("out of memory", "another program may hold all of a GPU's memory"),
        3 => ("the driver isn't initialised, or the process ends", "start the program again"),
        34 => (
            "a stub library stands in for the driver",
            "take the folder `stubs` of the toolkit out of LD_LIBRARY_PATH",
        ),
        46 => (
            "another process has the GPU for itself",
            "`nvidia-smi` shows which, and in which compute mode the GPU is",
        ),
        100 => (
            "no GPU that it may use",
            "CUDA_VISIBLE_DEVICES may hide them, a container needs to be given them (--gpus all), and a job of Slurm has to ask for them (--gpus-per-node)",
        ),
        101 => ("no GPU of that number", "CUDA_VISIBLE_DEVICES may name one that isn't there"),
        200 => ("machine code that is damaged", "remove the folder of compiled kernels"),
        201 | 400 | 500 => ("a name or handle that it doesn't know", OF_OURS),
        209 => ("machine code for another GPU", "remove the folder of compiled kernels"),
        214 => (
            "the GPU's memory has an error that can't be corrected",
            "`nvidia-smi -q -d ECC` tells more; the GPU wants a reset, and perhaps a replacement",
        ),
        220 => ("a fault of NVLink", "`nvidia-smi nvlink -e` tells more; the machine wants a look"),
        226 => ("a fault that the GPU has contained", "the GPU is lost to this process, but not to the next"),
        700 => ("an access to memory that isn't there", WHICH_KERNEL),
        701 => ("a launch that wants more registers or threads than the GPU has", OF_OURS),
        702 => ("a kernel ran for longer than the system allows", "use a GPU that no display hangs on"),
        715 => ("an instruction that the GPU doesn't know", WHICH_KERNEL),
        716 => ("an access to memory at a place that its type doesn't allow", WHICH_KERNEL),
        717 | 718 => ("an access to an address of another kind of memory, or of no code", WHICH_KERNEL),
        719 => ("a kernel failed", WHICH_KERNEL),
        802 => ("the system isn't ready", "on machines with NVSwitch, start nvidia-fabricmanager"),
        803 => (
            "the driver's library and its kernel module differ in version",
            "restart the machine after an update of the driver",
        ),
        804 => ("this GPU doesn't support forward compatibility", "remove the package cuda-compat"),
        900 => ("not allowed while a stream is captured", NOT_IN_CAPTURE),
        901 => ("the capture was spoilt by an earlier call", NOT_IN_CAPTURE),
        904 => (
            "another stream joined the capture and didn't come back",
            "let the captured stream wait for its event",
        ),
        902 | 905 | 907 => (
            "an event of a capture and one outside of it can't wait for each other",
            "record the event in the same capture that waits for it",
        ),
        908 => ("a capture is ended by another thread than the one that began it", OF_OURS),
        999 => ("an unknown error", "restarting the machine, or reloading nvidia_uvm, often helps"),
        _ => return None,
    })
}

/// What to do about a code that isn't in the list.
pub(crate) const UNKNOWN_HINT: &str = "the system's log may say more (`dmesg`)";
