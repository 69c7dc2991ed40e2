//! `phalanx cluster aws`: the configuration of a cluster of AWS ParallelCluster, written and checked without an account.

mod config;
mod flags;
mod instances;
mod rules;
mod yaml;

pub(crate) use flags::ClusterArgs;

use crate::args::{WrongUsage, read_up_to};
use crate::say::{print, say};
use anyhow::{Context, Result, bail};
use flags::{Aws, Cluster, InitArgs};
use rules::{Finding, check};
use serde_json::json;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

/// A configuration of people isn't longer.
const MOST_BYTES: u64 = 1 << 20;

pub(crate) fn cluster(args: &ClusterArgs) -> Result<u8> {
    let Cluster::Aws { what } = &args.what;
    match what {
        Aws::Init(args) => init(args),
        Aws::Check { file, json } => check_file(file, *json),
    }
}

fn init(args: &InitArgs) -> Result<u8> {
    let config = config::config(args).map_err(WrongUsage)?;
    let text = config.text();
    if args.dry_run {
        print(text.trim_end());
        return Ok(0);
    }
    let path = args.out.display();
    let mut options = OpenOptions::new();
    options.write(true).create_new(!args.force).create(true).truncate(true);
    let file = options.open(&args.out);
    let mut file =
        file.with_context(|| format!("{path}: can't be made (--force writes over one that is there)"))?;
    file.write_all(text.as_bytes()).with_context(|| format!("{path}: can't be written"))?;
    say(format_args!("wrote {path}"));
    say(config.next_steps(&path.to_string()));
    Ok(0)
}

fn check_file(file: &Path, as_json: bool) -> Result<u8> {
    let name = file.display();
    let read = read_up_to(MOST_BYTES, file).with_context(|| format!("{name}: can't be read"))?;
    let Some(bytes) = read else {
        bail!(
            "{name}: has more than {MOST_BYTES} bytes, as no configuration has\nhint: give the config.yaml of pcluster"
        );
    };
    let found = check(&String::from_utf8_lossy(&bytes));
    for Finding { line, is_error, path, why } in &found {
        let kind = if *is_error { "error" } else { "warning" };
        match as_json {
            true => {
                print(json!({"file": name.to_string(), "line": line, "kind": kind, "key": path, "why": why}))
            }
            false => print(format_args!("{name}:{line}: {kind}: {path}: {why}")),
        }
    }
    let errors = found.iter().filter(|finding| finding.is_error).count();
    say(format_args!("{name}: {errors} errors, {} warnings", found.len() - errors));
    Ok(u8::from(errors > 0))
}
