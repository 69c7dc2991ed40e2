//! Colour jitter, with the arithmetic of Pillow's `ImageEnhance` and of its HSV images, which torchvision uses.

use super::draw::{Draws, below, between};

/// How much colours may change. What is 0 doesn't change.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Jitter {
    /// Brightness is multiplied by a factor from `1 - brightness` (but at least 0) to `1 + brightness`.
    pub brightness: f64,
    /// Distances from the mean grey are multiplied by such a factor.
    pub contrast: f64,
    /// Distances from each pixel's grey are multiplied by such a factor.
    pub saturation: f64,
    /// Hues are turned by up to this part of the circle, at most 0.5, in either direction.
    pub hue: f64,
}

/// One change of colours.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Change {
    Brightness(f32),
    Contrast(f32),
    Saturation(f32),
    /// In 256ths of the circle.
    Hue(u8),
}

impl Jitter {
    /// The changes for a sample, in their order, which is random, too.
    pub(crate) fn draw(&self, draws: &Draws, place: u8) -> [Option<Change>; 4] {
        let [a, b, c, d] = draws.words(place, 0);
        let factor = |word, strength: f64| between(word, (1.0 - strength).max(0.0), 1.0 + strength) as f32;
        let mut changes = [
            (self.brightness > 0.0).then(|| Change::Brightness(factor(a, self.brightness))),
            (self.contrast > 0.0).then(|| Change::Contrast(factor(b, self.contrast))),
            (self.saturation > 0.0).then(|| Change::Saturation(factor(c, self.saturation))),
            // Truncated and wrapped, as the conversion to an unsigned byte does there.
            (self.hue > 0.0).then(|| Change::Hue((between(d, -self.hue, self.hue) * 255.0) as i32 as u8)),
        ];
        let words = draws.words(place, 1);
        for last in (1..changes.len()).rev() {
            changes.swap(last, below(words[last], last + 1));
        }
        changes
    }
}

impl Change {
    /// Makes the change in an image of three planes.
    pub(crate) fn make(self, bytes: &mut [u8]) {
        let plane = bytes.len() / 3;
        let (red, rest) = bytes.split_at_mut(plane);
        let (green, blue) = rest.split_at_mut(plane);
        let pixels = red.iter_mut().zip(green).zip(blue).map(|((r, g), b)| [r, g, b]);
        match self {
            Change::Brightness(factor) => {
                bytes.iter_mut().for_each(|byte| *byte = blend(0, *byte, factor));
            }
            Change::Contrast(factor) => {
                let sum: u64 = pixels.map(|[r, g, b]| u64::from(grey(*r, *g, *b))).sum();
                let mean = (sum as f64 / plane as f64 + 0.5) as u8;
                bytes.iter_mut().for_each(|byte| *byte = blend(mean, *byte, factor));
            }
            Change::Saturation(factor) => pixels.for_each(|[r, g, b]| {
                let grey = grey(*r, *g, *b);
                for byte in [r, g, b] {
                    *byte = blend(grey, *byte, factor);
                }
            }),
            Change::Hue(turn) => pixels.for_each(|[r, g, b]| {
                let (hue, saturation, value) = to_hsv(*r, *g, *b);
                (*r, *g, *b) = from_hsv(hue.wrapping_add(turn), saturation, value);
            }),
        }
    }
}

/// From `from` towards `to`, and beyond it where `factor` is above 1.
fn blend(from: u8, to: u8, factor: f32) -> u8 {
    let (from, to) = (f32::from(from), f32::from(to));
    // The conversion truncates, and keeps to 0 and 255.
    (from + factor * (to - from)) as u8
}

/// The luma of ITU-R 601, in 16 bits after the point.
fn grey(r: u8, g: u8, b: u8) -> u8 {
    ((u32::from(r) * 19595 + u32::from(g) * 38470 + u32::from(b) * 7471 + 0x8000) >> 16) as u8
}

fn to_hsv(r: u8, g: u8, b: u8) -> (u8, u8, u8) {
    let (high, low) = (r.max(g).max(b), r.min(g).min(b));
    if high == low {
        return (0, 0, high);
    }
    let range = f32::from(high - low);
    let saturation = range / f32::from(high);
    let [rc, gc, bc] = [r, g, b].map(|colour| f32::from(high - colour) / range);
    let sixths = if r == high {
        f64::from(bc - gc)
    } else if g == high {
        2.0 + f64::from(rc) - f64::from(bc)
    } else {
        4.0 + f64::from(gc) - f64::from(rc)
    };
    // Stored as a float between the two steps there.
    let hue = ((f64::from(sixths as f32) / 6.0 + 1.0) % 1.0) as f32;
    ((f64::from(hue) * 255.0) as u8, (f64::from(saturation) * 255.0) as u8, high)
}

fn from_hsv(hue: u8, saturation: u8, value: u8) -> (u8, u8, u8) {
    if saturation == 0 {
        return (value, value, value);
    }
    let sixths = f64::from(hue) * 6.0 / 255.0;
    let sector = sixths.floor();
    let part = f64::from((sixths - sector) as f32);
    let strength = f64::from((f64::from(saturation) / 255.0) as f32);
    let scaled = |share: f64| (f64::from(value) * share).round() as u8;
    let p = scaled(1.0 - strength);
    let q = scaled(1.0 - strength * part);
    let t = scaled(1.0 - strength * (1.0 - part));
    match sector as u32 % 6 {
        0 => (value, t, p),
        1 => (q, value, p),
        2 => (p, value, t),
        3 => (p, q, value),
        4 => (t, p, value),
        _ => (value, p, q),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Pillow makes of a sweep over all colours; `tests/golden/make.py` prints these folds.
    #[test]
    fn changes_are_pillows() {
        // Every fifth value of each colour.
        let levels = || (0..=255u8).step_by(5);
        let colours: Vec<[u8; 3]> =
            levels().flat_map(|r| levels().flat_map(move |g| levels().map(move |b| [r, g, b]))).collect();
        let planes: Vec<u8> =
            (0..3).flat_map(|plane| colours.iter().map(move |colour| colour[plane])).collect();
        let fold = |bytes: &[u8]| {
            bytes.iter().fold(0u64, |h, &byte| h.wrapping_mul(31).wrapping_add(u64::from(byte)))
        };
        for (change, expected) in GOLDEN {
            let mut bytes = planes.clone();
            change.make(&mut bytes);
            assert_eq!(fold(&bytes), *expected, "{change:?}");
        }
    }

    const GOLDEN: &[(Change, u64)] = &[
        (Change::Brightness(0.0), 0x0),
        (Change::Contrast(0.0), 0xcba6b996bf3e0000),
        (Change::Saturation(0.0), 0xbbb31b00438174b2),
        (Change::Brightness(0.4), 0x990543dd2fdb2d40),
        (Change::Contrast(0.4), 0xb1f0420eb167fd40),
        (Change::Saturation(0.4), 0xb85779c5a6d1098c),
        (Change::Brightness(1.0), 0x7e8d29a8f7a3f120),
        (Change::Contrast(1.0), 0x7e8d29a8f7a3f120),
        (Change::Saturation(1.0), 0x7e8d29a8f7a3f120),
        (Change::Brightness(1.7), 0x304c3ddb28d83780),
        (Change::Contrast(1.7), 0x3f4167c30b7d1f80),
        (Change::Saturation(1.7), 0x9f808d718adcb431),
        (Change::Hue(129), 0x98da163667f1f518),
        (Change::Hue(231), 0xd257885b6bbb5c59),
        (Change::Hue(0), 0xbd3ed140475f2255),
        (Change::Hue(17), 0xba1860d7ea3d2513),
        (Change::Hue(127), 0x76614b566a117696),
    ];
}
