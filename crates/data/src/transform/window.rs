//! Crops, paddings and mirrors of an image, which move no byte until they must.
//!
//! A window is a rectangle over an image, perhaps beyond its borders and perhaps seen in a mirror. Flips and crops only move
//! the window, so that a flipped crop of a padded image is written once, straight into the batch, by [`Window::paint`].

use crate::images::{COLOURS, Image};
use phalanx_tensor::Border;

/// Leaves bytes as they are.
pub(crate) const SAME: [[u8; 256]; COLOURS] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = byte as u8;
        byte += 1;
    }
    [table; COLOURS]
};

/// What is seen of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// The image's row that is the first one of the window; beyond the image there is its border.
    top: isize,
    left: isize,
    pub(crate) height: usize,
    pub(crate) width: usize,
    /// Whether left and right are exchanged.
    mirrored: bool,
    border: Border,
}

impl Window {
    /// All of an image.
    pub(crate) fn whole(height: usize, width: usize) -> Window {
        Window { top: 0, left: 0, height, width, mirrored: false, border: Border::Black }
    }

    pub(crate) fn mirror(&mut self) {
        self.mirrored = !self.mirrored;
    }

    /// Whether a crop may be made by moving the window: it must lie within what is seen, as beyond that there would be a border,
    /// unless all of the image is seen and the border begins beyond the window, too.
    pub(crate) fn allows(
        &self,
        image: [usize; 2],
        top: isize,
        left: isize,
        height: usize,
        width: usize,
    ) -> bool {
        let whole = (self.top, self.left, [self.height, self.width]) == (0, 0, image);
        whole || self.holds(top, left, height, width)
    }

    /// Whether a crop shows nothing that the window doesn't.
    fn holds(&self, top: isize, left: isize, height: usize, width: usize) -> bool {
        let within = |start: isize, length: usize, of: usize| start >= 0 && start as usize + length <= of;
        within(top, height, self.height) && within(left, width, self.width)
    }

    /// Moves the window to `height` and `width` from `top` and `left` of what it shows, which it [`Window::allows`]; `border` is what
    /// is seen beyond that.
    pub(crate) fn crop(&mut self, border: Border, top: isize, left: isize, height: usize, width: usize) {
        if !self.holds(top, left, height, width) {
            self.border = border;
        }
        self.top += top;
        self.left += match self.mirrored {
            false => left,
            true => self.width as isize - left - width as isize,
        };
        (self.height, self.width) = (height, width);
    }

    /// Writes what is seen of `image`, plane after plane: what the plane's table holds for each byte, and for 0 where it is black.
    #[inline]
    pub(crate) fn paint<T: Copy>(&self, image: Image<'_>, into: &mut [T], tables: &[[T; 256]; COLOURS]) {
        let Window { top, left, height, width, mirrored, border } = *self;
        // The columns of the image that are seen, and where the first of them lands.
        let from = left.clamp(0, image.width as isize) as usize;
        let to = (left + width as isize).clamp(from as isize, image.width as isize) as usize;
        let before = match mirrored {
            false => from as isize - left,
            true => left + width as isize - to as isize,
        };
        let before = before.clamp(0, width as isize) as usize;
        let planes =
            into.chunks_exact_mut(height * width).zip(image.bytes.chunks_exact(image.height * image.width));
        for (table, (into, bytes)) in tables.iter().zip(planes) {
            for (y, row) in into.chunks_exact_mut(width).enumerate() {
                let Some(y) = border.seen((top + y as isize) as i64, image.height) else {
                    row.fill(table[0]);
                    continue;
                };
                let line = &bytes[y * image.width..][..image.width];
                let seen = &line[from..to];
                let (margin, rest) = row.split_at_mut(before);
                let (middle, after) = rest.split_at_mut(seen.len());
                if border == Border::Black {
                    margin.fill(table[0]);
                    after.fill(table[0]);
                } else {
                    // The places before and behind the image, by the window's columns.
                    let behind = before + seen.len();
                    for (margin, first) in [(margin, 0), (after, behind)] {
                        for (x, out) in (first..).zip(margin) {
                            let x = if mirrored { width - 1 - x } else { x };
                            let x = border.seen((left + x as isize) as i64, image.width);
                            *out = table[usize::from(x.map_or(0, |x| line[x]))];
                        }
                    }
                }
                if mirrored {
                    middle
                        .iter_mut()
                        .zip(seen.iter().rev())
                        .for_each(|(out, &byte)| *out = table[usize::from(byte)]);
                } else {
                    middle.iter_mut().zip(seen).for_each(|(out, &byte)| *out = table[usize::from(byte)]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A window as it is defined: what is seen at a place of it.
    type Seen = Box<dyn Fn(usize, isize, isize) -> u8>;

    proptest! {
        /// Any row of crops and mirrors shows what the definitions say, one after the other.
        #[test]
        fn windows_of_windows_show_what_single_steps_would(
            (height, width) in (1usize..6, 1usize..6),
            steps in proptest::collection::vec((any::<bool>(), -3isize..4, -3isize..4, 1usize..7, 1usize..7, any::<bool>()), 0..5),
        ) {
            let bytes: Vec<u8> = (1..=(COLOURS * height * width) as u8).collect();
            let kept = bytes.clone();
            let mut seen: Seen = Box::new(move |plane, y, x| kept[(plane * height + y as usize) * width + x as usize]);
            let mut window = Window::whole(height, width);
            for (mirror, top, left, h, w, is_reflected) in steps {
                if mirror {
                    let last = window.width as isize - 1;
                    window.mirror();
                    seen = Box::new(move |plane, y, x| seen(plane, y, last - x));
                } else if window.allows([height, width], top, left, h, w) {
                    let border = if is_reflected { Border::Reflect } else { Border::Black };
                    let [from_height, from_width] = [window.height, window.width];
                    window.crop(border, top, left, h, w);
                    seen = Box::new(move |plane, y, x| {
                        let [row, column] = [y + top, x + left];
                        let row = border.seen(row as i64, from_height);
                        let column = border.seen(column as i64, from_width);
                        row.zip(column).map_or(0, |(row, column)| seen(plane, row as isize, column as isize))
                    });
                }
            }
            let mut painted = vec![77u8; COLOURS * window.height * window.width];
            window.paint(Image { height, width, bytes: &bytes }, &mut painted, &SAME);
            let mut expected = Vec::new();
            for plane in 0..COLOURS {
                for y in 0..window.height as isize {
                    expected.extend((0..window.width as isize).map(|x| seen(plane, y, x)));
                }
            }
            prop_assert_eq!(painted, expected);
        }
    }
}
