//! Timelines as pictures: a row a rank, time to the right.

use super::schedule::{Action, Work};
use super::timeline::{Done, Timeline};
use std::fmt::Write;

/// Columns that the shortest action gets where there is room: its letter, its micro-batch, and a gap.
const SHORTEST: f64 = 3.0;

/// A picture of letters, at most `columns` wide: `F` forward, `B` backward, `I` and `W` its two parts, each with the number of
/// its micro-batch where that fits; dots are idle time.
pub fn text(timeline: &Timeline, columns: usize) -> String {
    let length = timeline.length();
    let all = || timeline.ranks.iter().flatten();
    let shortest = all().map(|done| done.end - done.start).fold(length, f64::min);
    let first = all().map(|done| done.start).fold(length, f64::min);
    let margin = format!("rank {} ", timeline.ranks.len().saturating_sub(1)).len();
    let room = columns.saturating_sub(margin).max(1) as f64;
    // A measured action may be very short, and then isn't what the scale goes by.
    let wanted = length / shortest.max(length / room) * SHORTEST;
    let scale = if length > 0.0 { wanted.min(room) / length } else { 1.0 };
    let mut out = String::new();
    for (rank, row) in timeline.ranks.iter().enumerate() {
        let mut line = vec![b'.'; (length * scale).round() as usize];
        for done in row {
            let at = |time: f64| (((time - first) * scale).round() as usize).min(line.len());
            let (start, end) = (at(done.start), at(done.end));
            let label = done.action.to_string();
            let cells = &mut line[start..end];
            cells.fill(b'-');
            cells.iter_mut().zip(label.bytes()).for_each(|(cell, letter)| *cell = letter);
            // A number that is cut off would be another number.
            if label.len() > cells.len() {
                cells.iter_mut().skip(1).for_each(|cell| *cell = b'-');
            }
        }
        let name = format!("rank {rank}");
        let line: String = line.into_iter().map(char::from).collect();
        writeln!(out, "{name:<0$}{line}", margin).expect("a string takes all");
    }
    out
}

/// Pixels of a row, and of the space below it.
const ROW: usize = 28;
const GAP: usize = 6;
/// Pixels of all time, and of the names before it.
const WIDTH: f64 = 1200.0;
const NAMES: f64 = 60.0;
/// Pixels above the rows, for the title.
const HEAD: usize = 34;
/// Pixels that a number needs.
const NUMBER: f64 = 14.0;

/// An SVG file with this title; lighter colours are later chunks of a rank. Reading it needs no script and no font of its own.
pub fn svg(timeline: &Timeline, title: &str) -> String {
    let length = timeline.length();
    let first = timeline.ranks.iter().flatten().map(|done| done.start).fold(length, f64::min);
    let scale = if length > 0.0 { WIDTH / length } else { 0.0 };
    let height = HEAD + timeline.ranks.len() * (ROW + GAP);
    let mut out = String::new();
    let mut line = |text: std::fmt::Arguments<'_>| writeln!(out, "{text}").expect("a string takes all");
    line(format_args!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {height}" font-family="sans-serif" font-size="11">"#,
        WIDTH + NAMES + 10.0
    ));
    line(format_args!(r#"<text x="4" y="20" font-size="14">{}</text>"#, escaped(title)));
    for (rank, row) in timeline.ranks.iter().enumerate() {
        let top = HEAD + rank * (ROW + GAP);
        line(format_args!(r#"<text x="4" y="{}">rank {rank}</text>"#, top + 18));
        line(format_args!(
            r##"<rect x="{NAMES}" y="{top}" width="{WIDTH}" height="{ROW}" fill="#f0f0f0"/>"##
        ));
        for Done { action, start, end } in row {
            let (x, width) = (NAMES + (start - first) * scale, (end - start) * scale);
            let Action { work, stage, micro_batch } = action;
            let chunk = stage / timeline.ranks.len();
            line(format_args!(
                r##"<rect x="{x:.2}" y="{top}" width="{width:.2}" height="{ROW}" fill="{}" fill-opacity="{:.2}" stroke="#fff" stroke-width="0.5"><title>{action} of stage {stage}</title></rect>"##,
                colour(*work),
                1.0 / (1.0 + 0.5 * chunk as f64),
            ));
            if width >= NUMBER {
                let (x, y) = (x + width / 2.0, top + 18);
                line(format_args!(r#"<text x="{x:.2}" y="{y}" text-anchor="middle">{micro_batch}</text>"#));
            }
        }
    }
    line(format_args!("</svg>"));
    out
}

fn colour(work: Work) -> &'static str {
    match work {
        Work::Forward => "#7aa6e8",
        Work::Backward => "#8fcf8f",
        Work::BackwardInput => "#f2c36b",
        Work::BackwardWeight => "#c79be0",
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::schedule::{Schedule, ScheduleKind, Shape, Times};
    use super::*;

    fn timeline(kind: ScheduleKind, micro_batches: usize) -> Timeline {
        let schedule = Schedule::new(kind, Shape { ranks: 2, chunks: 1, micro_batches }).unwrap();
        Timeline::simulate(&schedule, Times::EQUAL, 0.0)
    }

    #[test]
    fn a_schedule_is_drawn_to_scale() {
        assert_eq!(
            text(&timeline(ScheduleKind::OneFOneB, 2), 80),
            "rank 0 F0-F1-......B0----...B1----\nrank 1 ...F0-B0----F1-B1----......\n"
        );
    }

    #[test]
    fn a_long_schedule_is_drawn_as_wide_as_there_is_room() {
        for columns in [10, 40, 120] {
            let drawn = text(&timeline(ScheduleKind::ZeroBubble, 64), columns);
            assert!(drawn.lines().count() == 2 && drawn.lines().all(|line| line.len() <= columns), "{drawn}");
        }
    }

    #[test]
    fn a_picture_has_a_box_an_action() {
        let timeline = timeline(ScheduleKind::ZeroBubble, 3);
        let drawn = svg(&timeline, "a <b> & c");
        let boxes = drawn.matches("<title>").count();
        assert_eq!(boxes, 2 * 3 * 3);
        assert!(
            drawn.contains("a &lt;b&gt; &amp; c") && drawn.starts_with("<svg") && drawn.ends_with("</svg>\n")
        );
    }
}
