//! Libraries from C++, made where they aren't there yet: a file is named after all that it is made of.

use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// A source of kernels for one type of elements.
#[derive(Clone, Debug)]
pub struct Module {
    /// The file's name in the folder of kernels.
    pub file: &'static str,
    /// What the type of elements is called in the sources.
    pub element: &'static str,
    /// Its kernels.
    pub kernels: Vec<&'static str>,
}

/// Compilers at work at a time.
const JOBS: usize = 2;

/// Where everything lies once it is built.
pub(crate) struct Built {
    /// As [`LIBRARIES`] names them.
    pub(crate) libraries: [PathBuf; LIBRARIES.len()],
    pub(crate) modules: PathBuf,
}

/// Each library: the folder of its source, its source, and the name that programs open it by.
pub(crate) const LIBRARIES: [(&str, &str, &str); 6] = [
    ("native/driver", "libcuda.cpp", "libcuda.so.1"),
    ("native/driver", "libnvrtc.cpp", "libnvrtc.so.13"),
    ("libraries", "cublaslt.cpp", "libcublasLt.so.13"),
    ("libraries", "cudnn.cpp", "libcudnn.so.9"),
    ("libraries", "nccl.cpp", "libnccl.so.2"),
    ("libraries", "nvml.cpp", "libnvidia-ml.so.1"),
];

/// Builds the fake libraries and a module of each of these sources in `folder`, which other processes may use, too.
pub(crate) fn build(folder: &Path, kernels: &Path, modules: &[Module]) -> Result<Built, String> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let native = own.join("native");
    let folder = folder.join("fake-cuda");
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    // Held until the end: whoever comes second finds everything made.
    let lock = File::create(folder.join("lock")).and_then(|file| file.lock().map(|()| file));
    let _lock = lock.map_err(|error| format!("{}: {error}", folder.display()))?;
    let headers = contents(&[&native, kernels]);
    let library = |(sources, file, _): (&str, &str, &str)| {
        let path = folder.join(format!("{file}-{:016x}.so", hash(&(file, contents(&[&own.join(sources)])))));
        (path, format!("#include \"{file}\"\n"))
    };
    let texts: Vec<(String, String)> = modules.iter().map(|module| (name(module), text(module))).collect();
    let of_modules = folder.join(format!("modules-{:016x}", hash(&(&texts, OF_ALL, headers))));
    fs::create_dir_all(&of_modules).map_err(|error| format!("{}: {error}", of_modules.display()))?;
    let libraries = LIBRARIES.map(library);
    let built =
        Built { libraries: libraries.each_ref().map(|(path, _)| path.clone()), modules: of_modules.clone() };
    let mut wanted = Vec::from(libraries);
    wanted.extend(texts.into_iter().map(|(name, text)| (of_modules.join(name), text)));
    wanted.retain(|(path, _)| !path.exists());
    let include = [native.join("driver"), own.join("libraries"), native, kernels.to_owned()];
    let linked = of_modules.join("linked.o");
    if !linked.exists() {
        compile(&linked, OF_ALL, &include, Kind::Object)?;
    }
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(None);
    thread::scope(|scope| {
        for _ in 0..JOBS {
            scope.spawn(|| {
                while let Some((path, text)) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let kind = Kind::Library(path.starts_with(&of_modules).then_some(&linked));
                    if let Err(cause) = compile(path, text, &include, kind) {
                        *failed.lock().unwrap() = Some(cause);
                    }
                }
            });
        }
    });
    match failed.into_inner().unwrap() {
        Some(cause) => Err(cause),
        None => Ok(built),
    }
}

/// What all modules are linked with.
const OF_ALL: &str = "#define SHARED_SECTION\n#include \"module.cpp\"\n";

/// As the fake driver looks for it.
fn name(module: &Module) -> String {
    format!("{}-{}.so", module.file, module.element)
}

fn text(module: &Module) -> String {
    let entries: String = module.kernels.iter().map(|name| format!("ENTRY({name}) ")).collect();
    format!(
        "#define SHARED_SECTION\n#include \"device.h\"\n#define ELEMENT {}\n#include \"{}\"\n#define ENTRIES {entries}\n#include \"module_kernels.cpp\"\n",
        module.element, module.file
    )
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// A hash of all files of the folders, which are the same by whatever path they are reached.
fn contents(folders: &[&Path]) -> u64 {
    let files = folders.iter().flat_map(|folder| {
        let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let mut files: Vec<PathBuf> =
            entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_file()).collect();
        files.sort();
        files
    });
    hash(&files.map(|file| fs::read(file).unwrap()).collect::<Vec<_>>())
}

/// What a text is compiled into.
#[derive(Clone, Copy)]
enum Kind<'a> {
    /// An object file.
    Object,
    /// A shared library, together with this object file.
    Library(Option<&'a PathBuf>),
}

/// Compiles `text` into `path`.
fn compile(path: &Path, text: &str, include: &[PathBuf], kind: Kind<'_>) -> Result<(), String> {
    let source = path.with_extension("cpp");
    let unfinished = path.with_extension("unfinished");
    fs::write(&source, text).map_err(|error| format!("{}: {error}", source.display()))?;
    let output = Command::new("c++")
        .args(["-std=c++17", "-O1", "-g1", "-fPIC", "-pthread"])
        .arg(if let Kind::Object = kind { "-c" } else { "-shared" })
        // Products are rounded before they are added, as the kernels' compiler is told; copies of a library stay apart; what guards jumps
        // takes one to another stack for a fault.
        .args([
            "-ffp-contract=off",
            "-U_FORTIFY_SOURCE",
            "-fno-gnu-unique",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unused-parameter",
        ])
        .args(include.iter().flat_map(|folder| [Path::new("-I"), folder]))
        .arg(&source)
        .args(if let Kind::Library(with) = kind { with } else { None })
        .arg("-o")
        .arg(&unfinished)
        .args(if let Kind::Library(_) = kind { Some("-ldl") } else { None })
        .output()
        .map_err(|error| format!("c++: {error}"))?;
    if !output.status.success() {
        return Err(format!("{}: {}", source.display(), String::from_utf8_lossy(&output.stderr)));
    }
    fs::rename(&unfinished, path).map_err(|error| format!("{}: {error}", path.display()))
}
