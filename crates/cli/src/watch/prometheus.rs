//! Numbers of runs and GPUs in Prometheus' text format (<https://prometheus.io/docs/instrumenting/exposition_formats/>).

use super::run::{State, Summary};
use crate::top::gpus::Shown;
use std::fmt::Write;

/// A number of a run, under its name, with a word about it.
type OfRun = (&'static str, &'static str, fn(&Summary) -> Option<f64>);

const OF_RUNS: [OfRun; 15] = [
    ("phalanx_run_steps_made", "Steps that were made.", |run| Some(run.made as f64)),
    ("phalanx_run_steps", "Steps of the whole run.", |run| Some(run.steps as f64)),
    ("phalanx_run_epoch", "The epoch, from 0.", |run| Some(run.epoch as f64)),
    ("phalanx_run_workers", "Workers that train.", |run| Some(run.world_size as f64)),
    ("phalanx_run_loss", "The loss of the last step.", |run| run.loss),
    ("phalanx_run_learning_rate", "The learning rate of the last step.", |run| run.lr),
    ("phalanx_run_step_seconds", "How long the last step took.", |run| run.ms.map(|ms| ms / 1e3)),
    ("phalanx_run_samples_per_second", "Samples a second, of all workers.", |run| run.samples_per_s),
    ("phalanx_run_test_loss", "The loss of the last evaluation.", |run| run.test_loss),
    ("phalanx_run_test_accuracy", "The share that the last evaluation told right.", |run| run.test_accuracy),
    ("phalanx_run_checkpoints", "Checkpoints that were taken.", |run| Some(run.checkpoints as f64)),
    ("phalanx_run_memberships", "How often workers were lost or came.", |run| Some(run.memberships as f64)),
    ("phalanx_run_told_timestamp_seconds", "When it told something last.", |run| run.told_at),
    ("phalanx_run_done", "1 once the run is over.", |run| {
        Some(f64::from(u8::from(run.state == State::Done)))
    }),
    ("phalanx_run_silent", "1 where a run tells nothing that isn't over.", |run| {
        Some(f64::from(u8::from(run.state == State::Silent)))
    }),
];

/// The numbers of a program's own.
const OF_METRICS: &str = "phalanx_run_test_metric";

/// A number of a GPU.
type OfGpu = (&'static str, &'static str, fn(&Shown) -> Option<f64>);

const OF_GPUS: [OfGpu; 5] = [
    ("phalanx_gpu_busy_ratio", "The share of time in which it computes.", |gpu| {
        gpu.busy_percent.map(|percent| f64::from(percent) / 100.0)
    }),
    ("phalanx_gpu_memory_used_bytes", "Memory that is taken.", |gpu| {
        gpu.used_bytes.map(|bytes| bytes as f64)
    }),
    ("phalanx_gpu_memory_bytes", "Memory that it has.", |gpu| gpu.total_bytes.map(|bytes| bytes as f64)),
    ("phalanx_gpu_power_watts", "What it takes.", |gpu| gpu.power_w),
    ("phalanx_gpu_temperature_celsius", "How warm it is.", |gpu| gpu.temperature_c.map(f64::from)),
];

/// All of them.
pub(super) fn text(runs: &[Summary], gpus: &[Shown]) -> String {
    let mut text = String::new();
    for (name, help, of) in OF_RUNS {
        let labels = |run: &Summary| format!("run=\"{}\"", escaped(&run.name));
        family(&mut text, name, help, runs.iter().map(|run| (labels(run), of(run))));
    }
    let metrics = runs.iter().flat_map(|run| {
        run.test_metrics.iter().map(|(metric, value)| {
            let labels = format!("run=\"{}\",metric=\"{}\"", escaped(&run.name), escaped(metric));
            (labels, Some(*value))
        })
    });
    family(&mut text, OF_METRICS, "What else the last evaluation told, by its name.", metrics);
    for (name, help, of) in OF_GPUS {
        let labels = |gpu: &Shown| {
            format!("gpu=\"{}\",name=\"{}\"", gpu.index, escaped(gpu.name.as_deref().unwrap_or_default()))
        };
        family(&mut text, name, help, gpus.iter().map(|gpu| (labels(gpu), of(gpu))));
    }
    text
}

/// A number of several things, without those of which it isn't known.
fn family(text: &mut String, name: &str, help: &str, samples: impl Iterator<Item = (String, Option<f64>)>) {
    let mut known = samples.filter_map(|(labels, value)| Some((labels, value?))).peekable();
    if known.peek().is_none() {
        return;
    }
    // A string takes all that is written to it.
    let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n");
    for (labels, value) in known {
        let value = match value {
            value if value.is_nan() => "NaN".to_owned(),
            f64::INFINITY => "+Inf".to_owned(),
            f64::NEG_INFINITY => "-Inf".to_owned(),
            value => value.to_string(),
        };
        let _ = writeln!(text, "{name}{{{labels}}} {value}");
    }
}

/// A label's value.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::super::run::Run;
    use super::super::run::tests::{epoch, step};
    use super::*;

    #[test]
    fn each_number_has_its_help_and_a_line_for_each_run_that_has_it() {
        let mut run = Run::new("a \"run\"\\".into());
        run.hear(&step(4, f64::NAN));
        run.hear(&epoch(&[("macro_f1", 0.5), ("a \"share\"", -1.0)]));
        let text = text(&[run.summary(), Run::new("b".into()).summary()], &[]);
        assert!(
            text.contains("# TYPE phalanx_run_loss gauge\nphalanx_run_loss{run=\"a \\\"run\\\"\\\\\"} NaN\n")
        );
        assert!(text.contains("phalanx_run_steps_made{run=\"b\"} 0\n"), "{text}");
        assert!(!text.contains("phalanx_run_loss{run=\"b\"}"), "{text}");
        let metrics = "phalanx_run_test_metric{run=\"a \\\"run\\\"\\\\\",metric=\"a \\\"share\\\"\"} -1\n";
        assert!(text.contains(metrics) && text.contains("metric=\"macro_f1\"} 0.5\n"), "{text}");
        assert!(text.contains("phalanx_run_step_seconds{run=\"a \\\"run\\\"\\\\\"} 0.004\n"), "{text}");
    }
}
