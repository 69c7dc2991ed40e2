//! `phalanx selftest`: whether a device is well, and how fast it is.

use crate::args::SelftestArgs;
use crate::say::print;
use anyhow::Result;
use phalanx::DeviceSpec;
use phalanx::selftest::{Extent, Finding, selftest};
use phalanx::tensor::DebugSync;
use serde::Serialize;
use std::time::Instant;

/// The last line of `--json`.
#[derive(Serialize)]
struct Done {
    selftest: &'static str,
    device: String,
    passed: bool,
    failed: usize,
    seconds: f64,
}

pub(crate) fn run(args: &SelftestArgs) -> Result<u8> {
    let spec = match args.device {
        // Not that of a local rank: there is none.
        DeviceSpec::Cuda(None) => DeviceSpec::Cuda(Some(0)),
        spec => spec,
    };
    let threads = args.threads.unwrap_or_else(phalanx::cores).max(1);
    let debug_sync = if args.debug_sync { DebugSync::Yes } else { DebugSync::No };
    let open = |ranks: usize| {
        let device = spec.open((threads / ranks).max(1), |_| 0, debug_sync)?;
        if args.exact_memory {
            device.set_exact_memory();
        }
        Ok(device)
    };
    let extent = if args.quick { Extent::Quick } else { Extent::Whole };
    let (start, mut failed) = (Instant::now(), 0);
    let device = format!("{:?}", open(1)?);
    if !args.json {
        print(&device);
    }
    selftest(&open, extent, &mut |finding| {
        failed += usize::from(finding.failure().is_some());
        if args.json {
            print(serde_json::to_string(&finding).expect("a finding is always JSON"));
        } else {
            print(told(&finding));
        }
    })?;
    let done = Done {
        selftest: "done",
        device,
        passed: failed == 0,
        failed,
        seconds: start.elapsed().as_secs_f64(),
    };
    if args.json {
        print(serde_json::to_string(&done)?);
    } else if failed == 0 {
        print(format_args!("all is well ({:.1} s)", done.seconds));
    } else {
        print(format_args!("{failed} of these FAILED ({:.1} s)", done.seconds));
    }
    Ok(u8::from(failed > 0))
}

/// A line for people.
fn told(finding: &Finding) -> String {
    let verdict = |failure: &Option<String>| match failure {
        None => "ok".to_owned(),
        Some(failure) => format!("FAILED: {failure}"),
    };
    match finding {
        Finding::Operations { name, dtype, cases, apart, tolerance, failure } => format!(
            "{name:<46} {dtype:<4} {cases:>4} cases, {apart:.1e} off, {tolerance:.1e} allowed: {}",
            verdict(failure)
        ),
        Finding::Run { name, steps, apart, tolerance, failure } => format!(
            "{name:<46} {steps:>8} steps, {apart:.1e} off, {tolerance:.1e} allowed: {}",
            verdict(failure)
        ),
        Finding::Untried { name, why } => format!("{name:<46} not tried: {why}"),
        Finding::Rate { name, size, value, unit } => format!("{name:<46} {value:>10.2} {unit} ({size})"),
    }
}
