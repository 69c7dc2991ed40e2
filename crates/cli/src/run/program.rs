//! What is really started: a .py file and a module with the active Python, anything else as it is.

use super::flags::RunArgs;
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// A program to start.
pub(super) struct Program {
    pub(super) program: OsString,
    pub(super) args: Vec<OsString>,
    /// How many of the arguments stand before the program's own.
    pub(super) before: usize,
}

pub(super) fn program(args: &RunArgs, name: &OsStr, arguments: &[OsString]) -> Program {
    if !is_python(args, name) {
        // A file in this folder is meant where a name could be looked for in PATH in vain, too.
        let here = Path::new(".").join(name);
        let found_here = !name.to_string_lossy().contains('/') && here.is_file() && !in_path(name);
        let program = if found_here { here.into() } else { name.to_owned() };
        return Program { program, args: arguments.to_vec(), before: 0 };
    }
    let mut python: Vec<OsString> = vec!["-u".into()];
    if args.module {
        python.push("-m".into());
    }
    python.push(name.to_owned());
    let before = python.len();
    python.extend_from_slice(arguments);
    let interpreter = args.python.clone().unwrap_or_else(active_python);
    Program { program: interpreter, args: python, before }
}

/// Whether it takes a Python to start it.
pub(super) fn is_python(args: &RunArgs, name: &OsStr) -> bool {
    let is_script = args.run_path || Path::new(name).extension().is_some_and(|e| e == "py");
    !args.no_python && (args.module || is_script)
}

fn in_path(program: &OsStr) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// `$PYTHON_EXEC`, the virtual environment's, or `python3`.
pub(super) fn active_python() -> OsString {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    // An environment that was removed since is no longer active.
    let of_environment =
        || Some(Path::new(&set("VIRTUAL_ENV")?).join("bin/python")).filter(|python| python.is_file());
    set("PYTHON_EXEC").or_else(|| of_environment().map(Into::into)).unwrap_or_else(|| "python3".into())
}
