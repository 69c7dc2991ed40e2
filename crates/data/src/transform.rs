//! What is done to an image between its bytes and the numbers that a model sees.
//!
//! A [`Pipeline`] is data: changes of the bytes in a given order, then the normalisation that makes numbers of them, then what
//! is done to numbers. Each random change is a function of the image and of the sample's draws (`transform/draw.rs`), which
//! are keyed by seed, epoch and the sample's number, so a sample looks the same in an epoch whatever the number of threads
//! and ranks. Arguments and arithmetic are torchvision's on Pillow's images. Which transforms are good for what is not
//! decided here.

mod colour;
mod draw;
mod placed;
mod resize;
mod window;

pub use colour::Jitter;
pub(crate) use draw::{Draws, below, beta};

use crate::images::{COLOURS, Image};
use colour::Change;
use draw::{between, unit};
use phalanx_tensor::Border;
use resize::Resizer;
pub(crate) use window::SAME;
use window::Window;

/// A change of an image's bytes. Sizes are height and width.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Transform {
    /// Exchanges left and right, with this probability.
    Flip {
        /// From 0 to 1.
        chance: f64,
    },
    /// Cuts a piece out at a random place, after `padding` rows and columns were put around the image.
    RandomCrop {
        /// How much on every side.
        padding: usize,
        /// What they show.
        border: Border,
        /// Of the piece.
        size: [usize; 2],
    },
    /// Cuts the middle out. What is smaller than that is padded with black.
    CentreCrop([usize; 2]),
    /// Brings the image to this size, whatever its shape was.
    Resize([usize; 2]),
    /// Brings the shorter side to this length and keeps the shape, unless that came to more than 16 million pixels: of an image that is
    /// hundreds of times as long as it is wide the longer side is cut short then.
    ResizeShorter(usize),
    /// Cuts a random piece out, of a random share of the image's area and a random shape, and brings it to a size.
    RandomResizedCrop {
        /// Of the result.
        size: [usize; 2],
        /// The least and the largest share of the area; the usual ones are 0.08 and 1.
        area: (f64, f64),
        /// The least and the largest width for a height of 1; the usual ones are 3/4 and 4/3.
        ratio: (f64, f64),
    },
    /// Changes colours at random.
    Jitter(Jitter),
}

impl Transform {
    /// Whether two samples of the same image can come out different.
    pub fn is_random(&self) -> bool {
        use Transform::*;
        match self {
            Flip { .. } | RandomCrop { .. } | RandomResizedCrop { .. } | Jitter(_) => true,
            CentreCrop(_) | Resize(_) | ResizeShorter(_) => false,
        }
    }
}

/// Each colour's number is `(byte / 255 - mean) / std`, computed in that order in `f32`, as torchvision's `ToTensor` and
/// `Normalize` do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalise {
    /// What becomes 0, for red, green and blue.
    pub mean: [f32; COLOURS],
    /// What becomes a distance of 1.
    pub std: [f32; COLOURS],
}

impl Normalise {
    /// From 0 to 1.
    pub const UNIT: Normalise = Normalise { mean: [0.0; COLOURS], std: [1.0; COLOURS] };
    /// Mean 0 and deviation 1 over the training images of CIFAR-10.
    pub const CIFAR10: Normalise =
        Normalise { mean: [0.4914, 0.4822, 0.4465], std: [0.2470, 0.2435, 0.2616] };
    /// Mean 0 and deviation 1 over the training images of CIFAR-100.
    pub const CIFAR100: Normalise =
        Normalise { mean: [0.5071, 0.4865, 0.4409], std: [0.2673, 0.2564, 0.2762] };
    /// Mean 0 and deviation 1 over ImageNet, which torchvision's weights are made for.
    pub const IMAGENET: Normalise = Normalise { mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225] };

    fn lookup(&self) -> Box<Lookup> {
        Box::new(std::array::from_fn(|colour| {
            std::array::from_fn(|byte| (byte as f32 / 255.0 - self.mean[colour]) / self.std[colour])
        }))
    }
}

/// The number that each byte of each colour becomes.
type Lookup = [[f32; 256]; COLOURS];

/// All that is done to an image.
#[derive(Clone, Debug, PartialEq)]
pub struct Pipeline {
    /// What changes bytes, first to last.
    pub steps: Vec<Transform>,
    /// How bytes become numbers.
    pub normalise: Normalise,
    /// The side of a square around a random pixel whose numbers become 0; 0 for none. What lies beyond the image is cut off.
    /// Source: DeVries and Taylor, <https://arxiv.org/abs/1708.04552>.
    pub cutout: usize,
    /// Alpha of mixup, from 0 for none to 1: each sample becomes a mixture with another one of the whole dataset, and its
    /// target the shares of the classes. Source: Zhang et al., <https://arxiv.org/abs/1710.09412>.
    pub mixup: f64,
}

impl Pipeline {
    /// Normalises, and changes nothing else.
    pub fn new(normalise: Normalise) -> Pipeline {
        Pipeline { steps: Vec::new(), normalise, cutout: 0, mixup: 0.0 }
    }

    /// The size that images of this size come out with (`None`: of different sizes), or why they can't all come out alike.
    pub fn output(&self, input: Option<[usize; 2]>) -> Result<[usize; 2], String> {
        if !(0.0..=1.0).contains(&self.mixup) {
            return Err(format!("mixup needs an alpha from 0 to 1, got: {}", self.mixup));
        }
        let mut size = input;
        for step in &self.steps {
            size = match *step {
                Transform::Flip { .. } => size,
                Transform::RandomCrop { padding, size: [height, width], .. } => {
                    let Some([h, w]) = size.map(|sides| sides.map(|side| side + 2 * padding)) else {
                        return Err("a random crop needs images of one size: resize them before it".into());
                    };
                    if height > h || width > w {
                        return Err(format!(
                            "a random crop of {height}x{width} needs larger images, got: {h}x{w} with the padding"
                        ));
                    }
                    Some([height, width])
                }
                Transform::Resize(size) | Transform::CentreCrop(size) => Some(size),
                Transform::RandomResizedCrop { size, .. } => Some(size),
                Transform::ResizeShorter(side) => size.map(|size| shorter(size, side)),
                Transform::Jitter(Jitter { brightness, contrast, saturation, hue }) => {
                    let strengths = [brightness, contrast, saturation];
                    if strengths.iter().any(|strength| *strength < 0.0) || !(0.0..=0.5).contains(&hue) {
                        return Err(format!(
                            "jitter needs strengths of at least 0 and a hue from 0 to 0.5, got: {strengths:?} and {hue}"
                        ));
                    }
                    size
                }
            };
            if size.is_some_and(|sides| sides.contains(&0)) {
                return Err(format!("no image can be left of {step:?}"));
            }
        }
        size.ok_or_else(|| "images of different sizes must be brought to one: set a size".into())
    }
}

/// No image gets more pixels where its shorter side is brought to a length: one pixel by thousands would take gigabytes.
const MOST_PIXELS: usize = 1 << 24;

/// The size of an image whose shorter side becomes `side`; the longer one is truncated, as torchvision does.
fn shorter([height, width]: [usize; 2], side: usize) -> [usize; 2] {
    let most = (MOST_PIXELS / side.max(1)).max(side);
    let longer = |long: usize, short: usize| (side.saturating_mul(long) / short).clamp(1, most);
    if height <= width { [side, longer(width, height)] } else { [longer(height, width), side] }
}

/// A pipeline that is ready to run.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) pipeline: Pipeline,
    lookup: Box<Lookup>,
}

/// The memory of a running pipeline, used again from image to image.
#[derive(Debug, Default)]
pub(crate) struct Room {
    front: Vec<u8>,
    back: Vec<u8>,
    resizer: Resizer,
}

/// The place of the cutout among the draws of a sample; the steps have those from 0.
pub(crate) const CUTOUT: u8 = 253;
/// That of the share of a mixture.
pub(crate) const SHARE: u8 = 254;
/// That of the other sample in it.
pub(crate) const PARTNER: u8 = 255;

impl Program {
    pub(crate) fn new(pipeline: Pipeline) -> Program {
        let lookup = pipeline.normalise.lookup();
        Program { pipeline, lookup }
    }

    /// Writes the numbers that `image` becomes, as many as the pipeline's output has.
    pub(crate) fn run(&self, image: Image<'_>, draws: &Draws, room: &mut Room, into: &mut [f32]) {
        let canvas = self.changed(image, draws, room);
        canvas.window.paint(canvas.image(), into, &self.lookup);
        if self.pipeline.cutout > 0 {
            cut_out(self.pipeline.cutout, draws, canvas.window.height, canvas.window.width, into);
        }
    }

    /// Writes the bytes that `image` becomes before they become numbers.
    pub(crate) fn run_bytes(&self, image: Image<'_>, draws: &Draws, room: &mut Room, into: &mut [u8]) {
        let canvas = self.changed(image, draws, room);
        canvas.window.paint(canvas.image(), into, &SAME);
    }

    /// The number that each byte of each colour becomes.
    pub(crate) fn table(&self) -> Vec<f32> {
        self.lookup.as_flattened().to_vec()
    }

    /// The image after all changes of its bytes.
    fn changed<'a>(&self, image: Image<'a>, draws: &Draws, room: &'a mut Room) -> Canvas<'a> {
        let mut canvas = Canvas::new(image, room);
        for (place, step) in self.pipeline.steps.iter().enumerate() {
            canvas.apply(step, draws, place as u8);
        }
        canvas
    }
}

fn cut_out(side: usize, draws: &Draws, height: usize, width: usize, into: &mut [f32]) {
    let [a, b, ..] = draws.words(CUTOUT, 0);
    let span = |centre: usize, of: usize| {
        let start = centre as isize - (side / 2) as isize;
        start.max(0) as usize..((start + side as isize) as usize).min(of)
    };
    let (rows, columns) = (span(below(a, height), height), span(below(b, width), width));
    for plane in into.chunks_exact_mut(height * width) {
        for row in plane.chunks_exact_mut(width).take(rows.end).skip(rows.start) {
            row[columns.clone()].fill(0.0);
        }
    }
}

/// An image under change.
struct Canvas<'a> {
    original: Image<'a>,
    /// The size of the image in `room.front`, once there is one.
    changed: Option<[usize; 2]>,
    window: Window,
    room: &'a mut Room,
}

impl<'a> Canvas<'a> {
    fn new(original: Image<'a>, room: &'a mut Room) -> Canvas<'a> {
        let window = Window::whole(original.height, original.width);
        Canvas { original, changed: None, window, room }
    }

    /// What the window is over.
    fn image(&self) -> Image<'_> {
        match self.changed {
            None => self.original,
            Some([height, width]) => Image { height, width, bytes: &self.room.front },
        }
    }

    fn apply(&mut self, step: &Transform, draws: &Draws, place: u8) {
        let (height, width) = (self.window.height, self.window.width);
        match *step {
            Transform::Flip { chance } => {
                if unit(draws.words(place, 0)[0]) < chance {
                    self.window.mirror();
                }
            }
            Transform::RandomCrop { padding, border, size: [h, w] } => {
                let [a, b, ..] = draws.words(place, 0);
                let top = below(a, height + 2 * padding - h + 1) as isize - padding as isize;
                let left = below(b, width + 2 * padding - w + 1) as isize - padding as isize;
                self.crop(border, top, left, h, w);
            }
            Transform::CentreCrop([h, w]) => {
                self.crop(Border::Black, middle(height, h), middle(width, w), h, w)
            }
            Transform::Resize(size) => self.resize(size),
            Transform::ResizeShorter(side) => self.resize(shorter([height, width], side)),
            Transform::RandomResizedCrop { size, area, ratio } => {
                let (top, left, h, w) = piece(draws, place, height, width, area, ratio);
                self.crop(Border::Black, top as isize, left as isize, h, w);
                self.resize(size);
            }
            Transform::Jitter(jitter) => {
                self.settle();
                for change in jitter.draw(draws, place).into_iter().flatten() {
                    Change::make(change, &mut self.room.front);
                }
            }
        }
    }

    /// `border` is what is seen where the piece goes beyond the image as it is now.
    fn crop(&mut self, border: Border, top: isize, left: isize, height: usize, width: usize) {
        let image = self.image();
        if !self.window.allows([image.height, image.width], top, left, height, width) {
            self.settle();
        }
        self.window.crop(border, top, left, height, width);
    }

    fn resize(&mut self, size: [usize; 2]) {
        if [self.window.height, self.window.width] == size {
            return;
        }
        if self.window != Window::whole(self.image().height, self.image().width) {
            self.settle();
        }
        let Room { front, back, resizer } = &mut *self.room;
        let image = match self.changed {
            None => self.original,
            Some([height, width]) => Image { height, width, bytes: front },
        };
        resizer.resize(image, size, back);
        self.becomes_back(size);
    }

    /// Writes what is seen into memory of its own.
    fn settle(&mut self) {
        let (height, width) = (self.window.height, self.window.width);
        let mut back = std::mem::take(&mut self.room.back);
        back.resize(COLOURS * height * width, 0);
        self.window.paint(self.image(), &mut back, &SAME);
        self.room.back = back;
        self.becomes_back([height, width]);
    }

    fn becomes_back(&mut self, [height, width]: [usize; 2]) {
        std::mem::swap(&mut self.room.front, &mut self.room.back);
        self.changed = Some([height, width]);
        self.window = Window::whole(height, width);
    }
}

/// Where the middle `inner` of `outer` begins; halves are rounded to even, as Python does.
fn middle(outer: usize, inner: usize) -> isize {
    ((outer as f64 - inner as f64) / 2.0).round_ties_even() as isize
}

/// Top, left, height and width of a random piece: the first of ten drawn ones that fits, else the largest middle piece of a
/// shape within bounds. As torchvision's `RandomResizedCrop.get_params`.
fn piece(
    draws: &Draws,
    place: u8,
    height: usize,
    width: usize,
    area: (f64, f64),
    ratio: (f64, f64),
) -> (usize, usize, usize, usize) {
    for attempt in 0..10 {
        let [a, b, c, d] = draws.words(place, attempt);
        let area = (height * width) as f64 * between(a, area.0, area.1);
        let ratio = between(b, ratio.0.ln(), ratio.1.ln()).exp();
        let w = (area * ratio).sqrt().round_ties_even() as usize;
        let h = (area / ratio).sqrt().round_ties_even() as usize;
        if (1..=width).contains(&w) && (1..=height).contains(&h) {
            return (below(c, height - h + 1), below(d, width - w + 1), h, w);
        }
    }
    let shape = width as f64 / height as f64;
    let (h, w) = if shape < ratio.0 {
        (((width as f64 / ratio.0).round_ties_even() as usize).clamp(1, height), width)
    } else if shape > ratio.1 {
        (height, ((height as f64 * ratio.1).round_ties_even() as usize).clamp(1, width))
    } else {
        (height, width)
    };
    ((height - h) / 2, (width - w) / 2, h, w)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longer_side_follows_the_shorter_one_until_it_takes_too_much() {
        for (size, side, want) in [
            ([500, 375], 256, [341, 256]),
            ([375, 500], 256, [256, 341]),
            ([7, 7], 1, [1, 1]),
            ([1, 1 << 14], 256, [256, MOST_PIXELS / 256]),
            ([1 << 14, 1], 1 << 13, [1 << 13, 1 << 13]),
        ] {
            assert_eq!(shorter(size, side), want, "{size:?}");
        }
    }
}
