//! A source of kernels as a program of the host, and launches of it. Where there is no compiler, tests say so and pass.

use phalanx_cuda::{Element, Geometry, KERNELS, Kernel, Parameter, Source, Work, kernel};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};
use std::thread;

/// Blocks of a grid at most, so that small tensors are larger than a grid, too.
const MOST_BLOCKS: u32 = 3;

/// What a kernel is handed.
pub(crate) enum Arg<'a> {
    /// Memory that it reads.
    In(&'a [u8]),
    /// Memory that it may write.
    Out(&'a mut [u8]),
    /// No memory.
    Null,
    /// A whole number.
    Int(i64),
    /// A float32.
    Float(f32),
    /// A float64.
    Double(f64),
    /// A struct.
    Struct(Vec<u8>),
}

impl Arg<'_> {
    /// Whether a kernel that wants `parameter` can take it.
    fn fits(&self, parameter: Parameter) -> bool {
        match self {
            Arg::In(_) => matches!(parameter, Parameter::Read | Parameter::ReadOrNull),
            Arg::Out(_) => matches!(parameter, Parameter::Write | Parameter::WriteOrNull),
            Arg::Null => matches!(parameter, Parameter::ReadOrNull | Parameter::WriteOrNull),
            Arg::Int(_) => parameter == Parameter::Int,
            Arg::Float(_) => parameter == Parameter::Float,
            Arg::Double(_) => parameter == Parameter::Double,
            Arg::Struct(bytes) => parameter == Parameter::Struct(bytes.len()),
        }
    }

    /// Its kind in a request, and its bytes.
    fn encoded(&self) -> (u8, Vec<u8>) {
        match self {
            Arg::In(bytes) => (1, bytes.to_vec()),
            Arg::Out(bytes) => (1, bytes.to_vec()),
            Arg::Null => (2, Vec::new()),
            Arg::Int(n) => (0, n.to_ne_bytes().to_vec()),
            Arg::Float(x) => (0, x.to_ne_bytes().to_vec()),
            Arg::Double(x) => (0, x.to_ne_bytes().to_vec()),
            Arg::Struct(bytes) => (0, bytes.clone()),
        }
    }

    /// How many bytes of it come back.
    fn answer_len(&self) -> usize {
        match self {
            Arg::In(bytes) => bytes.len(),
            Arg::Out(bytes) => bytes.len(),
            _ => 0,
        }
    }
}

/// Whether the host has a compiler with sanitizers; said aloud where it hasn't.
pub(crate) fn there_is_a_compiler() -> bool {
    static FOUND: OnceLock<Result<(), String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let out = folder().join("trial");
        compiled("#include <cmath>\nint main() { return 0; }", Kind::Program(None), &out).and_then(|()| {
            let ran = Command::new(&out).status().map_err(|error| error.to_string())?;
            if ran.success() { Ok(()) } else { Err(format!("a sanitized program ends with {ran}")) }
        })
    });
    if let Err(cause) = found {
        eprintln!("skipped: no C++ compiler with sanitizers (package g++): {cause}");
    }
    found.is_ok()
}

fn folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-on-host");
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// What a text is compiled into.
#[derive(Clone, Copy)]
enum Kind<'a> {
    /// An object file.
    Object,
    /// A program, together with this object file.
    Program(Option<&'a Path>),
}

/// Compiles `text` into `out`.
fn compiled(text: &str, kind: Kind<'_>, out: &Path) -> Result<(), String> {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    // Other processes may be about the same program.
    let own = PathBuf::from(format!("{}.{}", out.display(), std::process::id()));
    let source = PathBuf::from(format!("{}.cpp", own.display()));
    std::fs::write(&source, text).unwrap();
    let output = Command::new("c++")
        .args([
            "-std=c++17",
            "-O1",
            "-g1",
            "-ffp-contract=off",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unused-parameter",
        ])
        .args(["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"])
        .arg("-I")
        .arg(crate_folder.join("kernels"))
        .arg("-I")
        .arg(crate_folder.join("tests/host"))
        .arg("-I")
        .arg(crate_folder.join("../fake_cuda/native"))
        .arg(&source)
        .args(match kind {
            Kind::Object => Some(Path::new("-c")),
            Kind::Program(driver) => driver,
        })
        .arg("-o")
        .arg(&own)
        .output()
        .map_err(|error| format!("c++: {error}"))?;
    std::fs::remove_file(&source).unwrap();
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    std::fs::rename(&own, out).map_err(|error| error.to_string())
}

/// How far behind a multiple of 16 bytes buffers may begin, where that is anything: kernels that copy beside their work want none.
fn behind(source: Source) -> usize {
    if source == Source::AttentionHalves { 0 } else { 8 }
}

/// The driver's text.
const DRIVER: &str = "#include \"driver.cpp\"\n";

/// What runs the kernels of each program, compiled once: with sanitizers that takes longer than the kernels of a small source.
fn driver() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let path = folder().join(format!("driver-{:016x}.o", fingerprint(DRIVER)));
        if !path.exists() {
            compiled(DRIVER, Kind::Object, &path).unwrap_or_else(|error| panic!("the driver: {error}"));
        }
        path
    })
}

/// The text of a program that can run all kernels of `source`.
fn text(source: Source, element: Element) -> String {
    let names = KERNELS.iter().filter(|kernel| kernel.source == source).map(|kernel| kernel.name);
    let entries: String = names.map(|name| format!("ENTRY({name}) ")).collect();
    format!(
        "#include \"device.h\"\n#define ELEMENT {}\n#include \"{}\"\n#define ENTRIES {entries}\n#define BEHIND {}\n#include \"entries.cpp\"\n",
        element.in_source(),
        source.file(),
        behind(source)
    )
}

/// What the text of a program includes changes it, too.
fn fingerprint(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    [text, DRIVER].hash(&mut hasher);
    for folder in ["kernels", "tests/host", "../fake_cuda/native"] {
        let entries = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap();
        let mut files: Vec<PathBuf> = entries
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_file() && path.extension().is_none_or(|kind| kind != "rs"))
            .collect();
        files.sort();
        files.iter().for_each(|file| std::fs::read(file).unwrap().hash(&mut hasher));
    }
    hasher.finish()
}

/// The program for `source`, made where it isn't there yet.
pub(crate) fn program(source: Source, element: Element) -> PathBuf {
    static AHEAD: Once = Once::new();
    // Threads of tests often want the same program, and wait for one compiler. Where all of them run (there is no argument), others are
    // made meanwhile, from those that are wanted last on.
    AHEAD.call_once(|| {
        if std::env::args().len() == 1 {
            thread::spawn(|| {
                for source in Source::ALL.into_iter().rev() {
                    source.elements().iter().rev().for_each(|&element| drop(made(source, element)));
                }
            });
        }
    });
    made(source, element)
}

fn made(source: Source, element: Element) -> PathBuf {
    type Made = Arc<OnceLock<PathBuf>>;
    // Each once, and beside others: compilers take most of these tests' time.
    static ALL: Mutex<BTreeMap<[&str; 2], Made>> = Mutex::new(BTreeMap::new());
    let key = [source.file(), element.in_source()];
    let made = ALL.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default().clone();
    let make = || {
        let text = text(source, element);
        let path = folder().join(format!("{}-{}-{:016x}", key[0], key[1], fingerprint(&text)));
        if !path.exists() {
            compiled(&text, Kind::Program(Some(driver())), &path)
                .unwrap_or_else(|error| panic!("{} on the host: {error}", source.file()));
        }
        path
    };
    made.get_or_init(make).clone()
}

/// Runs a kernel over all its work in a grid that is at times smaller; nothing where there is nothing to do.
#[track_caller]
pub(crate) fn launch(name: &str, element: Element, work: Work, args: &mut [Arg<'_>]) {
    let kernel = kernel(name);
    check(kernel, args);
    let Some(geometry) = kernel.geometry(work, MOST_BLOCKS) else { return };
    run(&program(kernel.source, element), name, geometry, args)
        .unwrap_or_else(|said| panic!("{name} over {work:?} for {element:?}: {said}"));
}

#[track_caller]
fn check(kernel: &Kernel, args: &[Arg<'_>]) {
    assert_eq!(kernel.parameters.len(), args.len(), "{}", kernel.name);
    for (i, (arg, &parameter)) in args.iter().zip(kernel.parameters).enumerate() {
        assert!(arg.fits(parameter), "{}: argument {i} is to be {parameter:?}", kernel.name);
    }
}

fn request(name: &str, geometry: Geometry, args: &[Arg<'_>]) -> Vec<u8> {
    let mut request = Vec::new();
    request.extend((name.len() as u32).to_ne_bytes());
    request.extend(name.as_bytes());
    request
        .extend([geometry.blocks, geometry.threads, args.len() as u32].iter().flat_map(|n| n.to_ne_bytes()));
    for (kind, bytes) in args.iter().map(Arg::encoded) {
        request.push(kind);
        request.extend((bytes.len() as u64).to_ne_bytes());
        request.extend(bytes);
    }
    request
}

/// A program that runs, and launches what it is asked to. To start one takes most of what a launch of little takes.
struct Running {
    process: Child,
    requests: Option<ChildStdin>,
    answers: ChildStdout,
    /// The file that it writes what is wrong to.
    said: PathBuf,
}

impl Running {
    fn start(program: &Path) -> Running {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let said = folder().join(format!("said.{}.{number}", std::process::id()));
        let mut process = Command::new(program)
            // It ends with its process, and looking for what was left fails under a debugger.
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&said).unwrap())
            .spawn()
            .unwrap();
        let (requests, answers) = (process.stdin.take(), process.stdout.take().unwrap());
        Running { process, requests, answers, said }
    }

    /// So many bytes that a request is answered with; none if it isn't.
    fn ask(&mut self, request: &[u8], n: usize) -> Option<Vec<u8>> {
        let requests = self.requests.as_mut()?;
        // It reads all before it writes, and ends where anything is wrong.
        requests.write_all(request).and_then(|()| requests.flush()).ok()?;
        let mut answer = vec![0; n];
        self.answers.read_exact(&mut answer).ok()?;
        // The next byte tells that this launch has ended well.
        let mut end = [0];
        self.answers.read_exact(&mut end).ok().filter(|()| end == *b".")?;
        Some(answer)
    }

    /// Waits for its end; gives what it said.
    fn end(&mut self) -> String {
        self.requests = None;
        let status = self.process.wait().unwrap();
        format!("{}\n{status}", String::from_utf8_lossy(&std::fs::read(&self.said).unwrap()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.requests = None;
        // It ends where no request can come any more.
        let _ = self.process.wait();
        let _ = std::fs::remove_file(&self.said);
    }
}

/// Launches a kernel; the error is what the program said before it ended.
fn run(program: &Path, kernel: &str, geometry: Geometry, args: &mut [Arg<'_>]) -> Result<(), String> {
    thread_local!(static RUNNING: RefCell<BTreeMap<PathBuf, Running>> = const { RefCell::new(BTreeMap::new()) });
    let n = args.iter().map(Arg::answer_len).sum();
    let answer = RUNNING.with_borrow_mut(|all| {
        let running = all.entry(program.to_owned()).or_insert_with(|| Running::start(program));
        let answer = running.ask(&request(kernel, geometry, args), n);
        answer.ok_or_else(|| all.remove(program).map(|mut ended| ended.end()).unwrap_or_default())
    })?;
    take(&answer, args);
    Ok(())
}

/// Puts what the buffers hold into those that may be written.
fn take(mut bytes: &[u8], args: &mut [Arg<'_>]) {
    for arg in args {
        match arg {
            Arg::In(before) => {
                let (after, rest) = bytes.split_at(before.len());
                assert!(after == *before, "memory that is only read was written");
                bytes = rest;
            }
            Arg::Out(out) => {
                let (own, rest) = bytes.split_at(out.len());
                out.copy_from_slice(own);
                bytes = rest;
            }
            _ => {}
        }
    }
    assert!(bytes.is_empty(), "{} bytes too many", bytes.len());
}

/// What a parameter is called in a signature that the program prints.
fn letter(parameter: &Parameter) -> String {
    match parameter {
        Parameter::Read | Parameter::ReadOrNull => "r".to_owned(),
        Parameter::Write | Parameter::WriteOrNull => "w".to_owned(),
        Parameter::Int => "l".to_owned(),
        Parameter::Float => "f".to_owned(),
        Parameter::Double => "d".to_owned(),
        Parameter::Struct(bytes) => format!("s{bytes}"),
    }
}

#[test]
fn kernels_take_what_the_list_says() {
    if !there_is_a_compiler() {
        return;
    }
    for source in Source::ALL {
        let output = Command::new(program(source, source.elements()[0])).arg("signatures").output().unwrap();
        let listed = KERNELS.iter().filter(|kernel| kernel.source == source);
        let lines = listed.map(|kernel| {
            let letters: String = kernel.parameters.iter().map(letter).collect();
            format!("{} {letters}\n", kernel.name)
        });
        assert_eq!(String::from_utf8_lossy(&output.stdout), lines.collect::<String>(), "{source:?}");
    }
}

/// A program of kernels that stand in a test.
pub(crate) fn trial(name: &str, kernels: &str, names: &[&str]) -> PathBuf {
    let entries: String = names.iter().map(|name| format!("ENTRY({name}) ")).collect();
    let text = format!(
        "#include \"device.h\"\n#include \"grid.cuh\"\n#include \"philox.cuh\"\n{kernels}\n#define ENTRIES {entries}\n#define BEHIND 8\n#include \"entries.cpp\"\n"
    );
    let path = folder().join(format!("{name}-{}", std::process::id()));
    compiled(&text, Kind::Program(Some(driver())), &path)
        .unwrap_or_else(|error| panic!("{name} on the host: {error}"));
    path
}

/// Runs a kernel of such a program with one block of `threads`.
pub(crate) fn run_trial(
    program: &Path,
    kernel: &str,
    threads: u32,
    args: &mut [Arg<'_>],
) -> Result<(), String> {
    run(program, kernel, Geometry { blocks: 1, threads }, args)
}

/// A program whose kernels are wrong on purpose: what the other tests rely on must be noticed.
#[test]
fn wrong_kernels_are_noticed() {
    if !there_is_a_compiler() {
        return;
    }
    let kernels = "
        extern \"C\" __global__ void reads_beside(const float *x, float *out, i64 n) { out[0] = x[n]; }
        extern \"C\" __global__ void writes_beside(const float *x, float *out, i64 n) { out[n] = x[0]; }
        extern \"C\" __global__ void forgets_a_barrier(const float *, float *out, i64) {
            __shared__ float seen[32];
            seen[threadIdx.x] = (float)threadIdx.x;
            if (threadIdx.x == 0) out[0] = seen[31];
        }
        extern \"C\" __global__ void leaves_others_waiting(const float *, float *, i64) {
            if (threadIdx.x != 0) __syncthreads();
        }
        extern \"C\" __global__ void races(const float *, float *out, i64) { out[0] = (float)threadIdx.x; }
        extern \"C\" __global__ void forgets_its_copies(const float *x, float *out, i64) {
            if (threadIdx.x == 0) host_copy_later(out, x, 4);
            host_close_copies();
        }
        // What a warp sees of copies that its neighbour has waited for, and no barrier stands between.
        extern \"C\" __global__ void reads_its_neighbours_copies(const float *x, float *out, i64) {
            __shared__ float seen[64];
            seen[threadIdx.x] = 0.0f;
            __syncthreads();
            host_copy_later(&seen[threadIdx.x], x + threadIdx.x % 3, 4);
            host_close_copies();
            host_wait_for_copies(0);
            const float mine = of_lane(seen[(threadIdx.x + 32) % 64], 1);
            if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = mine;
        }
        // Copies to where a neighbour may still read, waited for and seen through a barrier.
        extern \"C\" __global__ void copies_where_others_read(const float *x, float *out, i64) {
            __shared__ float seen[64];
            seen[threadIdx.x] = 0.0f;
            __syncthreads();
            const float before = of_lane(seen[(threadIdx.x + 32) % 64], 1);
            host_copy_later(&seen[threadIdx.x], x + threadIdx.x % 3, 4);
            host_close_copies();
            host_wait_for_copies(0);
            __syncthreads();
            if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = before + seen[threadIdx.x];
        }
        extern \"C\" __global__ void goes_apart(const float *, float *out, i64) {
            const float mine = threadIdx.x % 2 ? of_lane(1.0f, 1) : (float)__ballot_sync(0xffffffffu, 1);
            if (threadIdx.x == 0) out[0] = mine;
        }
        extern \"C\" __global__ void shuffles_apart(const float *, float *out, i64) {
            const float mine = of_lane(1.0f, threadIdx.x % 2 ? 1 : 2);
            if (threadIdx.x == 0) out[0] = mine;
        }
        extern \"C\" __global__ void is_right(const float *x, float *out, i64 n) {
            __shared__ float seen[64];
            host_copy_later(&seen[threadIdx.x], x + threadIdx.x % 3, 4);
            host_close_copies();
            host_wait_for_copies(0);
            __syncthreads();
            const float mine = of_lane(seen[(threadIdx.x + 32) % 64], 1);
            if (threadIdx.x == 0) out[n - 1] = mine;
        }
    ";
    // What each is to be told of, and with how many threads it is.
    let rows = [
        ("reads_beside", 32, "heap-buffer-overflow"),
        ("writes_beside", 32, "heap-buffer-overflow"),
        ("forgets_a_barrier", 32, "the order of threads, or where buffers begin, shows"),
        ("leaves_others_waiting", 32, "threads wait for others"),
        ("races", 32, "the order of threads, or where buffers begin, shows"),
        ("forgets_its_copies", 32, "before its copies have come"),
        ("reads_its_neighbours_copies", 64, "the order of threads, or where buffers begin, shows"),
        ("copies_where_others_read", 64, "the order of threads, or where buffers begin, shows"),
        ("goes_apart", 32, "lanes of a warp meet at different operations"),
        ("shuffles_apart", 32, "lanes of a warp meet at different operations"),
        ("is_right", 64, ""),
    ];
    let path = trial("wrong", kernels, &rows.map(|(name, ..)| name));
    let values = [1.0f32, 2.0, 3.0];
    for (name, threads, want) in rows {
        let mut out = [0; 12];
        let mut args = [Arg::In(bytemuck::cast_slice(&values)), Arg::Out(&mut out), Arg::Int(3)];
        let said = run_trial(&path, name, threads, &mut args);
        match said {
            Ok(()) => assert!(want.is_empty(), "{name} wasn't noticed"),
            Err(said) => assert!(!want.is_empty() && said.contains(want), "{name}: {said}"),
        }
    }
    std::fs::remove_file(path).unwrap();
}
