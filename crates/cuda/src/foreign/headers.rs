//! The tables against NVIDIA's own headers: types of functions, values of constants, sizes of structs, as assertions that a C++
//! compiler checks. The headers come with the Python packages nvidia-cublas, nvidia-cudnn-cu13, nvidia-nccl-cu13,
//! nvidia-cuda-runtime, nvidia-nvml-dev and what these need; `PHALANX_TEST_CUDA_INCLUDE` names the folders, with `:` between them.

use crate::foreign::Function;
use std::path::PathBuf;
use std::process::Command;

/// What our words for types are in C, beside those of the library at hand.
const PLAIN: [(&str, &str); 9] = [
    ("c_int", "int"),
    ("c_uint", "unsigned int"),
    ("c_char", "char"),
    ("c_void", "void"),
    ("usize", "size_t"),
    ("u64", "uint64_t"),
    ("i64", "int64_t"),
    ("()", "void"),
    ("StreamHandle", "cudaStream_t"),
];

/// A type of ours in C.
fn in_c(ours: &str, names: &[(&str, &str)]) -> String {
    if let Some(to) = ours.strip_prefix("*mut ") {
        return in_c(to, names) + "*";
    }
    if let Some(to) = ours.strip_prefix("*const ") {
        return in_c(to, names) + " const*";
    }
    let found = names.iter().chain(&PLAIN).find(|(name, _)| *name == ours);
    found.unwrap_or_else(|| panic!("{ours}: nobody says what that is in C")).1.to_owned()
}

fn function_assertion(function: &Function, names: &[(&str, &str)]) -> String {
    let parameters: Vec<String> = function.parameters.iter().map(|ours| in_c(ours, names)).collect();
    format!(
        "static_assert(std::is_same_v<decltype(&{name}), {result} (*)({parameters})>, \"{name}\");\n",
        name = function.name,
        result = in_c(function.result, names),
        parameters = parameters.join(", ")
    )
}

fn constant_assertion(&(name, value): &(&str, i64)) -> String {
    format!("static_assert(static_cast<long long>({name}) == {value}, \"{name}\");\n")
}

/// Compiles the assertions, if headers and a compiler are at hand; says so aloud if not.
pub(crate) fn check(
    header: &str,
    functions: &[Function],
    constants: &[(&str, i64)],
    names: &[(&str, &str)],
    more: &str,
) {
    let Some(folders) = std::env::var_os("PHALANX_TEST_CUDA_INCLUDE") else {
        return eprintln!("skipped: PHALANX_TEST_CUDA_INCLUDE names no folders with {header}");
    };
    let mut text = format!("#include <cstddef>\n#include <type_traits>\n#include <{header}>\n");
    // What is deprecated is checked as well.
    text += "#pragma GCC diagnostic ignored \"-Wdeprecated-declarations\"\n";
    text.extend(functions.iter().map(|function| function_assertion(function, names)));
    text.extend(constants.iter().map(constant_assertion));
    text += more;
    let source = std::env::temp_dir().join(format!("phalanx-{header}-{}.cpp", std::process::id()));
    std::fs::write(&source, text).unwrap();
    let folders = std::env::split_paths(&folders).flat_map(|folder| [PathBuf::from("-isystem"), folder]);
    let compiled =
        Command::new("c++").args(["-std=c++17", "-fsyntax-only"]).args(folders).arg(&source).output();
    std::fs::remove_file(&source).unwrap();
    match compiled {
        Err(error) => eprintln!("skipped: no C++ compiler (package g++): {error}"),
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
    }
}

/// The folders of NVIDIA's own libraries, which the Python packages nvidia-cublas and nvidia-cudnn-cu13 bring, or none, said aloud.
pub(crate) fn libraries() -> Option<Vec<PathBuf>> {
    let Some(folders) = std::env::var_os("PHALANX_TEST_CUDA_LIBRARIES") else {
        eprintln!("skipped: PHALANX_TEST_CUDA_LIBRARIES names no folders of NVIDIA's libraries");
        return None;
    };
    Some(std::env::split_paths(&folders).collect())
}

#[test]
fn types_are_put_into_c_from_the_inside() {
    let names = [("Status", "status_t")];
    assert_eq!(in_c("*const Status", &names), "status_t const*");
    assert_eq!(in_c("*mut *const c_char", &names), "char const**");
    let function = Function { name: "f", parameters: &["usize", "*mut Status"], result: "Status" };
    let want = "static_assert(std::is_same_v<decltype(&f), status_t (*)(size_t, status_t*)>, \"f\");\n";
    assert_eq!(function_assertion(&function, &names), want);
}
