//! `phalanx slurm lint`.

use crate::args::read_up_to;
use crate::say::{harmless, print, say};
use anyhow::{Context, Result};
use phalanx_launch::slurm::lint::{Finding, lint as judge};
use serde_json::json;
use std::path::Path;

/// A script of people isn't longer.
const MOST_BYTES: u64 = 4 << 20;

/// Tells every mistake of a script; the exit code says whether there is one.
pub(crate) fn lint(file: &Path, as_json: bool) -> Result<u8> {
    let name = file.display();
    let read = read_up_to(MOST_BYTES, file).with_context(|| format!("{name}: can't be read"))?;
    let Some(bytes) = read else {
        anyhow::bail!(
            "{name}: has more than {MOST_BYTES} bytes, as no batch script has\nhint: give the script itself"
        );
    };
    let text = String::from_utf8_lossy(&bytes);
    let folder = std::env::current_dir().unwrap_or_default();
    let found = judge(&text, &|path| folder.join(path).is_dir());
    for Finding { line, rule, why, instead } in &found {
        if as_json {
            print(
                json!({"file": name.to_string(), "line": line, "rule": rule, "why": why, "instead": instead}),
            );
            continue;
        }
        let typed = text.lines().nth(line - 1).unwrap_or_default().trim();
        print(format_args!("{name}:{line}: {} [{rule}]", harmless(why)));
        if !typed.is_empty() {
            print(format_args!("    now:     {}", harmless(typed)));
        }
        print(format_args!("    instead: {}", harmless(instead)));
    }
    match found.len() {
        0 => say(format_args!("{name}: no mistake found")),
        1 => say(format_args!("{name}: 1 mistake")),
        n => say(format_args!("{name}: {n} mistakes")),
    }
    Ok(u8::from(!found.is_empty()))
}
