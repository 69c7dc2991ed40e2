//! Progress for people, on standard error: a bar on a terminal, a line an epoch elsewhere.

use crate::events::line_of;
use crate::say::{print, say};
use indicatif::{ProgressBar, ProgressStyle};
use phalanx::data::{FetchEvent, Progress};
use phalanx::{Event, Observer, Scores};
use std::io::IsTerminal;

/// Shows a training run.
pub(crate) struct TrainBar {
    bar: Option<ProgressBar>,
    epochs_of: u64,
    samples: usize,
    last_samples: Option<(std::time::Instant, u64)>,
    rate: f64,
    /// Print the loss this often, as the PyTorch example does.
    log_interval: Option<u64>,
}

impl TrainBar {
    /// A bar, once a run tells that it begins; at once where that is known of one that has begun.
    pub(crate) fn new(log_interval: Option<u64>, about: Option<&Event>) -> TrainBar {
        let (bar, last_samples) = (None, None);
        let mut shown = TrainBar { bar, epochs_of: 1, samples: 0, last_samples, rate: 0.0, log_interval };
        if let Some(Event::Start { steps_per_epoch, steps, samples, .. }) = about {
            shown.begin(*steps_per_epoch, *steps, *samples);
        }
        shown
    }

    /// Of a run of so many steps.
    fn begin(&mut self, steps_per_epoch: u64, steps: u64, samples: usize) {
        (self.epochs_of, self.samples) = (steps_per_epoch.max(1), samples);
        if std::io::stderr().is_terminal() {
            let style = ProgressStyle::with_template("{prefix} {bar:28} {pos}/{len} {msg} {eta} left");
            let style = style.expect("the template is well-formed");
            self.bar = Some(ProgressBar::new(steps).with_style(style));
        }
    }

    fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| say(line)),
            None => say(line),
        }
    }
}

/// How a model does, behind something else.
fn told(scores: &Scores) -> String {
    let mut told = String::new();
    if let Some(loss) = scores.test_loss {
        told += &format!(", test loss {loss:.4}");
    }
    if let Some(accuracy) = scores.test_accuracy {
        told += &format!(", test accuracy {:.2}%", 100.0 * accuracy);
    }
    if let Some(top5) = scores.test_top5 {
        told += &format!(" (top five {:.2}%)", 100.0 * top5);
    }
    match (scores.test_bits_per_byte, scores.test_perplexity) {
        (Some(bits), Some(perplexity)) => {
            told += &format!(", {bits:.3} bits a byte (perplexity {perplexity:.2})");
        }
        (None, Some(perplexity)) => told += &format!(", perplexity {perplexity:.2}"),
        _ => {}
    }
    for (name, value) in &scores.test_metrics {
        told += &format!(", {name} {value:.4}");
    }
    told
}

/// Steps between two that people are told of: often enough for the eye, too seldom to cost anything.
const BAR_STEPS: u64 = 10;

/// How many steps lie between two that a bar is told of.
pub(crate) fn bar_steps(log_interval: Option<u64>) -> u64 {
    log_interval.unwrap_or(BAR_STEPS).max(1)
}

impl Observer for TrainBar {
    fn every(&self) -> u64 {
        bar_steps(self.log_interval)
    }

    fn event(&mut self, event: &Event) {
        match event {
            Event::Start { world_size, parameters, steps_per_epoch, steps, samples } => {
                let workers = if *world_size == 1 { "worker" } else { "workers" };
                self.say(&format!("{parameters} parameters, {samples} samples, {world_size} {workers}"));
                self.begin(*steps_per_epoch, *steps, *samples);
            }
            Event::Step { step, epoch, loss, samples, .. } => {
                let now = std::time::Instant::now();
                if let Some((then, before)) = self.last_samples {
                    self.rate = (samples - before) as f64 / now.duration_since(then).as_secs_f64().max(1e-9);
                }
                self.last_samples = Some((now, *samples));
                if let Some(bar) = &self.bar {
                    bar.set_prefix(format!("epoch {epoch}"));
                    bar.set_message(format!("loss {loss:.4} {:.0} images/s", self.rate));
                    bar.set_position(step + 1);
                }
                if self.log_interval.is_some() {
                    let within = step % self.epochs_of;
                    let global_batch = *samples / (step + 1);
                    let done = within * global_batch;
                    let percent = 100 * within / self.epochs_of;
                    let line = format!(
                        "Train Epoch: {} [{done}/{} ({percent}%)]\tLoss: {loss:.6}",
                        epoch + 1,
                        self.samples
                    );
                    match &self.bar {
                        Some(bar) => bar.suspend(|| print(&line)),
                        None => print(&line),
                    }
                }
            }
            Event::Members { step, world_size, ms, .. } => {
                let workers = if *world_size == 1 { "worker" } else { "workers" };
                let ms = ms.map_or(String::new(), |ms| format!(" ({ms:.0} ms)"));
                self.say(&format!("step {step}: going on with {world_size} {workers}{ms}"));
            }
            Event::Epoch { epoch, seconds, samples_per_s, test, each_once, skipped, .. } => {
                self.last_samples = None;
                let mut line =
                    format!("epoch {epoch}: {seconds:.2} s, {samples_per_s:.0} samples/s{}", told(test));
                if *each_once == Some(false) {
                    line += ", NOT each sample once";
                }
                if *skipped > 0 {
                    line += &format!(", {skipped} bad images replaced");
                }
                self.say(&line);
            }
            Event::Evaluation { world_size, samples, seconds, test } => {
                let plural = if *world_size == 1 { "" } else { "s" };
                let scores = told(test);
                self.say(&format!("{samples} samples, {world_size} worker{plural}: {seconds:.2} s{scores}"));
            }
            Event::Resume { step, epoch, path } => {
                // It may be an earlier step than the last one.
                self.last_samples = None;
                self.say(&format!("going on with step {step} of epoch {epoch}, from {path}"));
            }
            Event::Checkpoint { .. } => {}
            Event::Note { message } => self.say(message),
            Event::Done { epochs, seconds, model, best_epoch, best_model, stopped_early, .. } => {
                if let Some(bar) = self.bar.take() {
                    bar.finish_and_clear();
                }
                if let (Some(best), true) = (best_epoch, *stopped_early) {
                    say(format_args!("stopped after {epochs} epochs: none was better since epoch {best}"));
                }
                if let (Some(best), Some(file)) = (best_epoch, best_model) {
                    say(format_args!("the best was epoch {best}, saved {file}"));
                }
                match model {
                    Some(model) => say(format_args!("done in {seconds:.2} s, saved {model}")),
                    None => say(format_args!("done in {seconds:.2} s")),
                }
            }
        }
    }
}

/// Shows a training run as JSON lines on standard output.
pub(crate) struct JsonLines;

impl Observer for JsonLines {
    fn event(&mut self, event: &Event) {
        print(String::from_utf8_lossy(line_of(event).trim_ascii_end()));
        // Programs read the line above, and whoever watches them should know as well.
        if let Event::Note { message } = event {
            say(message);
        }
    }
}

/// Shows how data is found and fetched.
pub(crate) struct FetchBar {
    bar: Option<ProgressBar>,
    file: String,
}

impl FetchBar {
    pub(crate) fn new() -> FetchBar {
        FetchBar { bar: None, file: String::new() }
    }
}

impl Progress for FetchBar {
    fn event(&mut self, event: FetchEvent<'_>) {
        match event {
            FetchEvent::Waiting { patience } => {
                let limit = patience.as_secs();
                say(format_args!(
                    "another process is fetching the same data: waiting until it is here, or for {limit} s in which nothing arrives"
                ));
            }
            FetchEvent::Asking { dataset, source } => say(format_args!("fetching {dataset} from {source}")),
            FetchEvent::Failed { source, reason } => say(format_args!("  {source}: {reason}")),
            FetchEvent::Bytes { file, done, total } => {
                if self.file != file {
                    self.file = file.to_owned();
                    let style =
                        ProgressStyle::with_template("  {msg} {bar:28} {bytes}/{total_bytes} {eta} left");
                    let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
                    let bar = bar
                        .with_style(style.expect("the template is well-formed"))
                        .with_message(file.to_owned());
                    self.bar = Some(bar);
                }
                if let Some(bar) = &self.bar {
                    bar.set_position(done);
                    if total == Some(done) {
                        bar.finish_and_clear();
                    }
                }
            }
            FetchEvent::Ready { dataset, folder } => {
                say(format_args!("{dataset} is in {}", folder.display()))
            }
            _ => {}
        }
    }
}
