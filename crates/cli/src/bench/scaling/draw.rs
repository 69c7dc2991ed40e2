//! Speed-up and efficiency as curves, of letters and as SVG.

use super::advice::{Expected, Mode};
use std::fmt::Write;

/// What is drawn of one mode.
pub(super) struct Curve<'a> {
    pub(super) mode: Mode,
    /// By the model, counts that double.
    pub(super) expected: &'a [Expected],
    /// As measured: workers, speed-up, and whether the model was kept from it.
    pub(super) measured: &'a [(usize, f64, bool)],
}

/// Rows and columns of a drawing.
const ROWS: usize = 12;
const COLUMNS: usize = 56;

/// Both curves of a mode, one below the other.
pub(super) fn text(curve: &Curve<'_>) -> String {
    let speed_up = |value: f64, _: f64| value;
    let efficiency = |value: f64, workers: f64| value / workers;
    let name = curve.mode.name();
    format!(
        "{name} speed-up (o measured, x held out, . model, / ideal)\n{}{name} efficiency\n{}",
        plot(curve, speed_up, None),
        plot(curve, efficiency, Some(1.0))
    )
}

/// Workers to the right, doubling; the value upwards, of the speed-up and the workers.
fn plot(curve: &Curve<'_>, value: impl Fn(f64, f64) -> f64, top: Option<f64>) -> String {
    let most = curve.expected.iter().map(|e| e.workers).chain(curve.measured.iter().map(|m| m.0)).max();
    let most = most.unwrap_or(1).max(2) as f64;
    let highest = curve.expected.iter().map(|e| value(e.speed_up, e.workers as f64));
    let measured = || curve.measured.iter().map(|&(workers, s, _)| value(s, workers as f64));
    let top = top.unwrap_or_else(|| highest.chain(measured()).fold(1.0, f64::max) * 1.1);
    let mut cells = vec![[b' '; COLUMNS]; ROWS];
    let mut put = |workers: f64, y: f64, letter: u8| {
        let column = (workers.log2() / most.log2() * (COLUMNS - 1) as f64).round() as usize;
        let row = (y / top * (ROWS - 1) as f64).round();
        if y.is_finite() && (0.0..ROWS as f64).contains(&row) && column < COLUMNS {
            cells[ROWS - 1 - row as usize][column] = letter;
        }
    };
    for column in 0..COLUMNS {
        let workers = most.powf(column as f64 / (COLUMNS - 1) as f64);
        put(workers, value(workers, workers), b'/');
        put(workers, value(between(curve.expected, workers), workers), b'.');
    }
    for &(workers, speed_up, held_out) in curve.measured {
        let workers = workers as f64;
        put(workers, value(speed_up, workers), if held_out { b'x' } else { b'o' });
    }
    let mut out = String::new();
    for (row, line) in cells.iter().enumerate() {
        let y = top * (ROWS - 1 - row) as f64 / (ROWS - 1) as f64;
        let line: String = line.iter().copied().map(char::from).collect();
        writeln!(out, "{y:7.2} |{}", line.trim_end()).expect("a string takes all");
    }
    let mut axis = vec![b' '; COLUMNS + 8];
    let mut workers = 1usize;
    while workers as f64 <= most {
        let column = ((workers as f64).log2() / most.log2() * (COLUMNS - 1) as f64).round() as usize;
        let label = workers.to_string();
        axis[column..column + label.len()].copy_from_slice(label.as_bytes());
        workers *= 2;
    }
    let axis: String = axis.into_iter().map(char::from).collect();
    writeln!(out, "workers  {}", axis.trim_end()).expect("a string takes all");
    out
}

/// The speed-up between counts of which it is known.
fn between(expected: &[Expected], workers: f64) -> f64 {
    let after = expected.iter().position(|e| e.workers as f64 >= workers - 1e-9);
    match after {
        None => f64::NAN,
        Some(0) => expected[0].speed_up,
        Some(i) => {
            let (a, b) = (&expected[i - 1], &expected[i]);
            let part = (workers / a.workers as f64).log2() / (b.workers as f64 / a.workers as f64).log2();
            a.speed_up + part * (b.speed_up - a.speed_up)
        }
    }
}

/// Pixels of a panel, and around it.
const SIDE: f64 = 420.0;
const MARGIN: f64 = 60.0;
const HEAD: f64 = 50.0;

/// An SVG file: a row of two panels a mode. The band is what the uncertainty allows.
pub(super) fn svg(curves: &[Curve<'_>], title: &str) -> String {
    let (width, height) = (2.0 * (SIDE + 2.0 * MARGIN), HEAD + curves.len() as f64 * (SIDE + 2.0 * MARGIN));
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n<text x=\"10\" y=\"24\" font-size=\"16\">{}</text>\n",
        escaped(title)
    );
    for (row, curve) in curves.iter().enumerate() {
        let y = HEAD + row as f64 * (SIDE + 2.0 * MARGIN) + 20.0;
        let speed_up = |value: f64, _: f64| value;
        let efficiency = |value: f64, workers: f64| value / workers;
        let name = curve.mode.name();
        panel(&mut out, curve, (MARGIN, y), &format!("{name}: speed-up"), speed_up, None);
        let x = SIDE + 3.0 * MARGIN;
        panel(&mut out, curve, (x, y), &format!("{name}: efficiency"), efficiency, Some(1.0));
    }
    out.push_str("</svg>\n");
    out
}

fn panel(
    out: &mut String,
    curve: &Curve<'_>,
    (left, top): (f64, f64),
    title: &str,
    value: impl Fn(f64, f64) -> f64,
    highest: Option<f64>,
) {
    let most = curve.expected.iter().map(|e| e.workers).chain(curve.measured.iter().map(|m| m.0)).max();
    let most = most.unwrap_or(1).max(2) as f64;
    let upper = curve.expected.iter().map(|e| value(e.speed_up_to, e.workers as f64));
    let highest = highest.unwrap_or_else(|| upper.fold(1.0, f64::max)) * 1.05;
    let x = |workers: f64| left + workers.log2() / most.log2() * SIDE;
    let y = |value: f64| top + SIDE * (1.0 - (value / highest).clamp(0.0, 1.0));
    let mut line = |text: std::fmt::Arguments<'_>| writeln!(out, "{text}").expect("a string takes all");
    line(format_args!(
        r##"<rect x="{left}" y="{top}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#999"/><text x="{left}" y="{}" font-size="14">{title}</text>"##,
        top - 6.0
    ));
    let mut workers = 1usize;
    while workers as f64 <= most {
        let at = x(workers as f64);
        line(format_args!(
            r#"<text x="{at:.1}" y="{:.1}" text-anchor="middle">{workers}</text>"#,
            top + SIDE + 16.0
        ));
        workers *= 2;
    }
    for part in 0..=4 {
        let at = highest * f64::from(part) / 4.0;
        line(format_args!(
            r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{at:.2}</text>"#,
            left - 4.0,
            y(at) + 4.0
        ));
    }
    let points = |of: &dyn Fn(&Expected) -> f64| {
        let point =
            |e: &Expected| format!("{:.1},{:.1}", x(e.workers as f64), y(value(of(e), e.workers as f64)));
        curve.expected.iter().map(point).collect::<Vec<_>>()
    };
    let mut band = points(&|e| e.speed_up_to);
    band.extend(points(&|e| e.speed_up_from).into_iter().rev());
    line(format_args!(r##"<polygon points="{}" fill="#7aa6e8" fill-opacity="0.25"/>"##, band.join(" ")));
    let ideal = points(&|e| e.workers as f64);
    line(format_args!(
        r##"<polyline points="{}" fill="none" stroke="#999" stroke-dasharray="4 4"/>"##,
        ideal.join(" ")
    ));
    let model = points(&|e| e.speed_up);
    line(format_args!(
        r##"<polyline points="{}" fill="none" stroke="#3465a4" stroke-width="2"/>"##,
        model.join(" ")
    ));
    for &(workers, speed_up, held_out) in curve.measured {
        let (cx, cy) = (x(workers as f64), y(value(speed_up, workers as f64)));
        let (fill, what) = if held_out { ("#fff", "held out") } else { ("#cc0000", "measured") };
        line(format_args!(
            r##"<circle cx="{cx:.1}" cy="{cy:.1}" r="4" fill="{fill}" stroke="#cc0000"><title>{workers} workers, {what}: {speed_up:.2}</title></circle>"##
        ));
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::model::{Parts, Predicted};
    use super::*;

    fn expected(workers: usize, speed_up: f64) -> Expected {
        let step = Predicted { ms: 1.0, within_ms: 0.0, parts: Parts::default() };
        let (speed_up_from, speed_up_to) = (0.9 * speed_up, 1.1 * speed_up);
        let efficiency = speed_up / workers as f64;
        Expected { workers, step, speed_up, speed_up_from, speed_up_to, efficiency, marginal: 1.0 }
    }

    #[test]
    fn curves_are_drawn() {
        let all = [expected(1, 1.0), expected(2, 1.8), expected(4, 3.0)];
        let measured = [(1, 1.0, false), (2, 1.8, false), (4, 2.0, true)];
        let curve = Curve { mode: Mode::Weak, expected: &all, measured: &measured };
        let drawn = text(&curve);
        let lines: Vec<&str> = drawn.lines().collect();
        assert_eq!(lines.len(), 2 * (ROWS + 2));
        assert!(lines.iter().all(|line| line.len() <= COLUMNS + 16), "{drawn}");
        assert_eq!(drawn.matches('x').count() - "x held".matches('x').count(), 2, "{drawn}");
        assert!(
            lines[ROWS + 1].starts_with("workers  1") && lines[ROWS + 1].trim_end().ends_with('4'),
            "{drawn}"
        );
        let file = svg(&[curve], "a <b>");
        assert!(file.starts_with("<svg") && file.ends_with("</svg>\n") && file.contains("a &lt;b&gt;"));
        assert_eq!((file.matches("<circle").count(), file.matches("<polygon").count()), (6, 2));
        assert!(!file.contains("NaN") && !file.contains("inf"), "{file}");
    }
}
