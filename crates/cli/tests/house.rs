//! House rules that can be checked: the arrows between the crates, the notes on unsafe code, and that documents name
//! nothing that isn't there.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The layer of each crate; arrows go strictly down.
const LAYERS: &[(&str, u32)] = &[
    ("wire", 0),
    ("memory", 0),
    ("pickle", 0),
    ("cuda", 0),
    ("fake_cuda", 0),
    ("comm", 1),
    ("tensor", 1),
    ("job", 1),
    ("nn", 2),
    ("data", 2),
    ("parallel", 3),
    ("coord", 3),
    ("phalanx", 4),
    ("launch", 4),
    ("pool", 4),
    ("cli", 5),
];

/// The dependencies of a crate on crates of ours, from its manifest.
fn arrows(manifest: &str) -> Vec<String> {
    let names = manifest
        .lines()
        .skip_while(|line| *line != "[dependencies]")
        .skip(1)
        .take_while(|l| !l.starts_with('['));
    let names = names
        .filter_map(|line| line.split(['.', ' ', '=']).next())
        .filter(|name| name.starts_with("phalanx"));
    names.map(|name| name.strip_prefix("phalanx-").unwrap_or(name).to_owned()).collect()
}

#[test]
fn dependencies_point_down() {
    let layers: BTreeMap<&str, u32> = LAYERS.iter().copied().collect();
    let mut folders: Vec<String> = fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    folders.sort();
    for folder in folders {
        let layer = layers
            .get(folder.as_str())
            .unwrap_or_else(|| panic!("crates/{folder} has no layer in this test"));
        let manifest = fs::read_to_string(root().join("crates").join(&folder).join("Cargo.toml")).unwrap();
        for other in arrows(&manifest) {
            assert!(
                layers[other.as_str()] < *layer,
                "crates/{folder} depends on {other}, which isn't below it"
            );
        }
    }
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn unsafe_code_stays_in_its_crates_and_says_why() {
    let mut files = Vec::new();
    sources(&root().join("crates"), &mut files);
    assert!(files.len() > 50, "found {} source files", files.len());
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let name = file.strip_prefix(root()).unwrap().display().to_string();
        let allowed = [
            "crates/tensor/",
            "crates/cuda/src/",
            "crates/cuda/tests/runtime/",
            "crates/fake_cuda/",
            "crates/cuda/tests/libraries/",
            "crates/launch/",
            "crates/memory/",
            "crates/comm/src/common.rs",
            "crates/comm/src/transport/memory.rs",
            "crates/comm/src/transport/tcp/info.rs",
            "crates/data/src/mapped.rs",
            "crates/job/src/stack.rs",
            "crates/nn/tests/steady_state.rs",
        ];
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let opens = ["unsafe {", "unsafe impl"].iter().any(|start| code.contains(start));
            if !opens || name == "crates/cli/tests/house.rs" {
                continue;
            }
            assert!(
                allowed.iter().any(|a| name.starts_with(a)),
                "{name}:{}: unsafe code has no place here",
                i + 1
            );
            let above = &lines[i.saturating_sub(6)..=i];
            assert!(
                above.iter().any(|l| l.contains("SAFETY:")),
                "{name}:{}: an unsafe block without a SAFETY note",
                i + 1
            );
        }
    }
}

/// `println!` and `eprintln!` panic when nobody listens any more.
#[test]
fn the_binary_prints_through_say_alone() {
    let mut files = Vec::new();
    sources(&root().join("crates/cli/src"), &mut files);
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
        let found = code.enumerate().find(|(_, code)| code.contains("print!(") || code.contains("println!("));
        assert!(
            found.is_none(),
            "{}:{:?}: say::say and say::print don't panic",
            file.display(),
            found.map(|f| f.0 + 1)
        );
    }
}

/// What isn't inlined into a kernel is compiled for a processor without vectors.
#[test]
fn closures_of_kernels_are_always_inlined() {
    let mut files = Vec::new();
    sources(&root().join("crates/tensor/src/cpu"), &mut files);
    let mut runs = 0;
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for (at, _) in text.match_indices(".run(") {
            let given = text[at + ".run(".len()..].trim_start();
            let line = text[..at].lines().count();
            assert!(
                given.starts_with("#[inline(always)]"),
                "{}:{line}: the closure of a kernel is #[inline(always)]: see cpu/arch.rs",
                file.display()
            );
            runs += 1;
        }
        let by_hand = text.find("dispatch(|").or(text.find("dispatch(move |"));
        assert!(by_hand.is_none(), "{}: Arch::run is for closures", file.display());
    }
    assert!(runs > 20, "{runs} kernels were found");
}

#[test]
fn paths_in_the_documents_exist() {
    let decisions = fs::read_dir(root().join("docs/decisions")).unwrap();
    let decisions: Vec<PathBuf> = decisions.map(|page| page.unwrap().path()).collect();
    assert!(decisions.len() > 5, "found {decisions:?}");
    let others = ["ARCHITECTURE.md", "README.md", "CONTRIBUTING.md"].map(|document| root().join(document));
    for document in decisions.iter().chain(&others) {
        let text = fs::read_to_string(document).unwrap();
        let document = document.display();
        for path in text.split('`').filter(|part| part.starts_with("crates/") || part.starts_with("docs/")) {
            let path = path.split([' ', ':', '<']).next().unwrap();
            assert!(root().join(path).exists(), "{document} names {path}, which doesn't exist");
        }
    }
}
