//! NVRTC: the compiler of kernels, as a library. It needs no GPU.

use crate::element::Element;
use crate::error::Error;
use crate::foreign::symbol;
use crate::library::{Library, Version};
use crate::source::{HEADERS, Source};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::PathBuf;

/// What a GPU can do: 8.0 for an A100, 9.0 for an H100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Architecture {
    /// 9 of 9.0.
    pub major: u32,
    /// 0 of 9.0.
    pub minor: u32,
}

impl Architecture {
    /// Whether it computes with bfloat16: those from 8.0 on have instructions for it, and NVIDIA's libraries products and convolutions.
    pub fn has_bfloat16(self) -> bool {
        self.major >= 8
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.major, self.minor)
    }
}

/// What comes of a compilation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Machine code for the architecture.
    Cubin,
    /// Text that the driver compiles for this architecture or a later one.
    Ptx,
}

/// What kernels are compiled into for a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) architecture: Architecture,
    pub(crate) form: Form,
}

impl Target {
    /// What a compiler that knows these architectures makes for a GPU of this one: machine code if it can, and for one that is newer
    /// text for the newest before it, which the driver compiles. None for one that is older than all.
    fn of(architecture: Architecture, known: &[Architecture]) -> Option<Target> {
        let newest = known.iter().copied().filter(|known| *known <= architecture).max()?;
        let form = if newest == architecture { Form::Cubin } else { Form::Ptx };
        Some(Target { architecture: newest, form })
    }
}

/// As the compiler calls it.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let form = match self.form {
            Form::Cubin => "sm",
            Form::Ptx => "compute",
        };
        write!(f, "{form}_{}", self.architecture)
    }
}

type Program = *mut c_void;
type Status = c_int;
type Strings = *const *const c_char;

/// The compiler, opened.
pub struct Nvrtc {
    version: Version,
    /// The architectures that it compiles for.
    known: Vec<Architecture>,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    create:
        unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, Strings, Strings) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, Strings) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    // The functions above are its. It stays for good, as others do.
    _library: ManuallyDrop<libloading::Library>,
}

/// What becomes of a compiler's warnings.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Warnings {
    AreErrors,
    Pass,
}

/// One row a function: the field and NVRTC's name.
macro_rules! functions {
    ($library:ident, $version:ident, $known:ident, $($field:ident $name:literal)*) => {
        // SAFETY: the types of the fields are those of nvrtc.h, and the library lies beside them.
        unsafe {
            Nvrtc { $($field: symbol(&$library, Library::Nvrtc, $name)?,)* version: $version, known: $known, _library: ManuallyDrop::new($library) }
        }
    };
}

/// The architectures that a compiler knows.
///
/// # Safety
/// `library` is NVRTC.
unsafe fn known(library: &libloading::Library) -> Result<Vec<Architecture>, Error> {
    let mut n = 0;
    // SAFETY: the types are those of nvrtc.h; the first call writes one number, and the second as many as that is.
    let numbers = unsafe {
        let count: unsafe extern "C" fn(*mut c_int) -> Status =
            symbol(library, Library::Nvrtc, "nvrtcGetNumSupportedArchs")?;
        let list: unsafe extern "C" fn(*mut c_int) -> Status =
            symbol(library, Library::Nvrtc, "nvrtcGetSupportedArchs")?;
        count(&mut n);
        let mut numbers = vec![0; n.max(0) as usize];
        list(numbers.as_mut_ptr());
        numbers
    };
    let architecture = |number| Architecture { major: number / 10, minor: number % 10 };
    Ok(numbers.into_iter().map(|number| architecture(number as u32)).collect())
}

/// Opens what NVRTC opens by its bare name once it compiles, which it finds if it is open: it looks where the system does, not where it
/// lies itself. Where it isn't in any of these folders, or can't be opened, NVRTC tells of it then.
fn open_builtins(folders: &[PathBuf], version: Version) {
    let file = format!("libnvrtc-builtins.so.{version}");
    let mut there = folders.iter().map(|folder| folder.join(&file)).filter(|path| path.is_file());
    // SAFETY: what it does as it is opened is what it does when NVRTC opens it.
    if let Some(Ok(opened)) = there.next().map(|path| unsafe { libloading::Library::new(path) }) {
        // For good, as NVRTC.
        let _ = ManuallyDrop::new(opened);
    }
}

impl Nvrtc {
    /// Opens the library: from one of `folders` if it is there, else from where the system looks.
    pub fn open(folders: &[PathBuf]) -> Result<Nvrtc, Error> {
        let library = Library::Nvrtc.open(folders)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the type is that of nvrtc.h, and the call writes two numbers.
        unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status =
                symbol(&library, Library::Nvrtc, "nvrtcVersion")?;
            version(&mut major, &mut minor);
        }
        let version = Version { major: major as u32, minor: minor as u32 };
        open_builtins(folders, version);
        // SAFETY: the library is NVRTC.
        let known = unsafe { known(&library)? };
        Ok(functions!(library, version, known,
            error_string "nvrtcGetErrorString"
            create "nvrtcCreateProgram"
            destroy "nvrtcDestroyProgram"
            compile "nvrtcCompileProgram"
            log_size "nvrtcGetProgramLogSize"
            log "nvrtcGetProgramLog"
            cubin_size "nvrtcGetCUBINSize"
            cubin "nvrtcGetCUBIN"
            ptx_size "nvrtcGetPTXSize"
            ptx "nvrtcGetPTX"
        ))
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The architectures that it compiles for.
    pub fn known(&self) -> &[Architecture] {
        &self.known
    }

    /// Compiles our kernels of `source` for tensors of `element`. A warning is an error.
    pub fn module(
        &self,
        source: Source,
        element: Element,
        architecture: Architecture,
        form: Form,
    ) -> Result<Vec<u8>, Error> {
        self.compile(source.file(), source.text(), element, architecture, form)
    }

    /// [`Nvrtc::module`] as machine code, and the text that the compiler made this of on its way.
    pub fn module_and_text(
        &self,
        source: Source,
        element: Element,
        architecture: Architecture,
    ) -> Result<(Vec<u8>, Vec<u8>), Error> {
        let target = Target { architecture, form: Form::Cubin };
        let both = |program: &OpenProgram<'_>| Ok((program.result(Form::Cubin)?, program.result(Form::Ptx)?));
        self.compiled(source.file(), source.text(), element, target, Warnings::AreErrors, both)
    }

    /// What is compiled for a GPU of this architecture.
    pub(crate) fn target(&self, architecture: Architecture) -> Result<Target, Error> {
        Target::of(architecture, &self.known).ok_or_else(|| Error::Architecture {
            architecture,
            compiler: self.version,
            oldest: self
                .known
                .iter()
                .min()
                .map_or_else(|| "none".to_owned(), |oldest| format!("sm_{oldest}")),
        })
    }

    /// What a GPU is given of a source, whatever the compiler warns of: it may be another one than those that the kernels were tried
    /// with.
    pub(crate) fn for_gpu(&self, source: Source, element: Element, target: Target) -> Result<Vec<u8>, Error> {
        let form = |program: &OpenProgram<'_>| program.result(target.form);
        self.compiled(source.file(), source.text(), element, target, Warnings::Pass, form)
    }

    /// Compiles `text`, which errors call `file` and which may include our headers. A warning is an error.
    pub fn compile(
        &self,
        file: &str,
        text: &str,
        element: Element,
        architecture: Architecture,
        form: Form,
    ) -> Result<Vec<u8>, Error> {
        let target = Target { architecture, form };
        self.compiled(file, text, element, target, Warnings::AreErrors, |program| program.result(form))
    }

    /// What `take` takes of the compiled program.
    fn compiled<T>(
        &self,
        file: &str,
        text: &str,
        element: Element,
        target: Target,
        warnings: Warnings,
        take: impl FnOnce(&OpenProgram<'_>) -> Result<T, String>,
    ) -> Result<T, Error> {
        let failed = |cause: String, log: String| Error::Compile {
            file: file.to_owned(),
            element: element.in_source(),
            architecture: target.to_string(),
            cause,
            log,
        };
        let options = options(element, target, self.version);
        let options: Vec<CString> = options.iter().map(|option| c_string(option)).collect();
        let program = self.program(file, text).map_err(|cause| failed(cause, String::new()))?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program lives; the options are strings that end in 0, as many as is said.
        let status = unsafe { (self.compile)(program.handle, options.len() as c_int, options.as_ptr()) };
        let log = program.log();
        if let Err(cause) = self.succeeded(status) {
            return Err(failed(cause, log));
        }
        if warnings == Warnings::AreErrors && !log.is_empty() {
            return Err(failed("warnings".to_owned(), log));
        }
        take(&program).map_err(|cause| failed(cause, String::new()))
    }

    fn program(&self, file: &str, text: &str) -> Result<OpenProgram<'_>, String> {
        let (file, text) = (c_string(file), c_string(text));
        let (names, texts) =
            (HEADERS.map(|header| c_string(header.0)), HEADERS.map(|header| c_string(header.1)));
        let (names, texts) = (names.each_ref().map(|s| s.as_ptr()), texts.each_ref().map(|s| s.as_ptr()));
        let mut handle = std::ptr::null_mut();
        // SAFETY: all strings end in 0 and outlive the call, which copies them.
        let status = unsafe {
            (self.create)(
                &mut handle,
                text.as_ptr(),
                file.as_ptr(),
                names.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        self.succeeded(status)?;
        Ok(OpenProgram { nvrtc: self, handle })
    }

    fn succeeded(&self, status: Status) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function gives a constant string for any number.
        let words = unsafe { CStr::from_ptr((self.error_string)(status)) };
        Err(words.to_string_lossy().into_owned())
    }
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nvrtc({})", self.version)
    }
}

/// The first compiler that takes a number of threads for what it makes of one text; some before it warn of the option.
const IN_THREADS: Version = Version { major: 12, minor: 6 };

/// What a compiler of this version is told, but for the text.
pub(crate) fn options(element: Element, target: Target, compiler: Version) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={target}"),
        "--std=c++17".to_owned(),
        // Without it compilers before 13.5 take a lambda that is given `auto` for a function of the host's.
        "--device-as-default-execution-space".to_owned(),
        // As on a CPU: a product is rounded before it is added, but where a kernel asks for less.
        "--fmad=false".to_owned(),
        format!("--define-macro=ELEMENT={}", element.in_source()),
    ];
    if compiler >= IN_THREADS {
        // Kernels of a text go to as many threads as there are cores.
        options.push("--split-compile=0".to_owned());
    }
    options
}

/// A text of ours as C wants it.
#[track_caller]
fn c_string(text: &str) -> CString {
    CString::new(text).expect("a source, a name and an option have no 0 in them")
}

/// A program of the compiler, which ends with this.
struct OpenProgram<'a> {
    nvrtc: &'a Nvrtc,
    handle: Program,
}

impl OpenProgram<'_> {
    /// What the compiler has to say, without the 0 at its end.
    fn log(&self) -> String {
        let log = self.bytes(self.nvrtc.log_size, self.nvrtc.log).unwrap_or_default();
        String::from_utf8_lossy(&log).trim_matches(['\0', '\n']).to_owned()
    }

    fn result(&self, form: Form) -> Result<Vec<u8>, String> {
        match form {
            Form::Cubin => self.bytes(self.nvrtc.cubin_size, self.nvrtc.cubin),
            Form::Ptx => self.bytes(self.nvrtc.ptx_size, self.nvrtc.ptx),
        }
    }

    /// As many bytes as the first function says, from the second.
    fn bytes(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> Status,
        get: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ) -> Result<Vec<u8>, String> {
        let mut n = 0;
        // SAFETY: the program lives, and the call writes one number.
        self.nvrtc.succeeded(unsafe { size(self.handle, &mut n) })?;
        let mut bytes = vec![0; n];
        // SAFETY: as above, and it writes as many bytes as it just said.
        self.nvrtc.succeeded(unsafe { get(self.handle, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for OpenProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: made in `program` and ended nowhere else.
        unsafe { (self.nvrtc.destroy)(&mut self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_takes_machine_code_or_text_for_one_before_it() {
        let sm = |number: u32| Architecture { major: number / 10, minor: number % 10 };
        let known = [75, 80, 86, 90, 100].map(sm);
        for (number, want) in [
            (90, Some("sm_90")),
            (75, Some("sm_75")),
            (89, Some("compute_86")),
            (121, Some("compute_100")),
            (70, None),
        ] {
            let target = Target::of(sm(number), &known).map(|target| target.to_string());
            assert_eq!(target.as_deref(), want, "sm_{number}");
        }
    }

    #[test]
    fn bfloat16_came_with_ampere() {
        let computes = |major, minor| Architecture { major, minor }.has_bfloat16();
        assert_eq!(
            [(7, 0), (7, 5), (8, 0), (12, 0)].map(|(major, minor)| computes(major, minor)),
            [false, false, true, true]
        );
    }

    #[test]
    fn a_compiler_is_told_of_threads_if_it_knows_them() {
        let told = |major, minor| {
            let (sm_90, compiler) = (Architecture { major: 9, minor: 0 }, Version { major, minor });
            let target = Target { architecture: sm_90, form: Form::Cubin };
            let options = options(Element::Bf16, target, compiler);
            assert!(options.contains(&"--gpu-architecture=sm_90".to_owned()), "{options:?}");
            options.iter().any(|option| option.starts_with("--split-compile"))
        };
        assert_eq!(
            [(11, 8), (12, 4), (12, 6), (13, 0)].map(|(major, minor)| told(major, minor)),
            [false, false, true, true]
        );
    }
}
