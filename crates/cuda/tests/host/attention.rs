//! Attention against the engine's definition in float64, made of other operations.

use crate::compare::near;
use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{decode, encode, floats, random, room};
use phalanx_cuda::{Element, Heads, Work};
use phalanx_tensor::{Device, DropoutKey, Gradients, Tensor, Within, backward};
use std::ops::Range;

/// How many roundings of float32, of the largest number that takes part, scores and sums over some hundreds of positions may take.
const STEPS: f64 = 100.0;

/// Which kernels, for which types: their names begin so, and their blocks have so many positions as their own.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    elements: &'static [Element],
    tile: usize,
    /// The numbers of a head that they are made for.
    depths: &'static [usize],
}

const PLAIN: Kind = Kind { name: "attention", elements: &Element::ALL, tile: 32, depths: &[64, 128, 256] };
const HALVES: Kind =
    Kind { name: "halves_attention", elements: &[Element::Bf16, Element::F16], tile: 64, depths: &[64, 128] };

/// Samples, positions, heads, numbers of a head.
type Sizes = [usize; 4];

/// What an attention leaves: the output, each query's number, and the gradient of queries, keys and values.
struct Left {
    out: Vec<f64>,
    lse: Vec<f64>,
    gradient: Vec<f64>,
}

/// Which shares are dropped: with which probability, by which key, from which head on of how many.
type Drop<'a> = Option<(f64, &'a DropoutKey)>;

impl Kind {
    /// The kernels' own, of numbers as the type holds them, where the queries at these positions are asked.
    fn run(
        &self,
        element: Element,
        [batch, time, heads, depth]: Sizes,
        asked: &Range<usize>,
        qkv: &[f64],
        grad: &[f64],
        drop: Drop<'_>,
    ) -> Left {
        let made_for = self.depths.iter().find(|made_for| **made_for >= depth).unwrap();
        let width = heads * depth;
        let p = drop.map_or(0.0, |(p, _)| p);
        let sizes = Heads {
            batch,
            time,
            heads,
            depth,
            from: asked.start,
            asking: asked.len(),
            first: drop.and_then(|(_, key)| key.within).map_or(0, |within| within.start),
            threshold: (p * f64::from(u32::MAX)) as u32,
            keep: (1.0 / (1.0 - p)) as f32,
            scale: (1.0 / (depth as f64).sqrt()) as f32,
        };
        let words = drop.map(|(_, key)| [key.seed, key.step, key.layer]);
        let drops = || match (&words, drop) {
            (Some(words), Some((_, key))) => {
                [Arg::In(bytemuck::cast_slice(words)), Arg::In(bytemuck::cast_slice(&key.samples))]
            }
            _ => [Arg::Null, Arg::Null],
        };
        let run = |name: &str, positions: usize, args: Vec<Arg<'_>>| {
            let mut args: Vec<Arg<'_>> =
                args.into_iter().chain(drops()).chain([Arg::Struct(sizes.to_bytes().to_vec())]).collect();
            let work = Work::Pieces((batch * heads * positions.div_ceil(self.tile)) as u64);
            launch(&format!("{}{name}_{made_for}", self.name), element, work, &mut args);
        };
        let (qkv, grad) = (encode(element, qkv), encode(element, grad));
        let n_queries = batch * heads * asked.len();
        let mut out = room(element, batch * asked.len() * width);
        let [mut lse, mut levels] = [room(Element::F32, n_queries), room(Element::F32, n_queries)];
        run("", asked.len(), vec![Arg::In(&qkv), Arg::Out(&mut out), Arg::Out(&mut lse)]);
        // Queries that nobody asks get none.
        let mut gradient = encode(element, &vec![0.0; 3 * batch * time * width]);
        let to_queries = [Arg::In(&qkv), Arg::In(&out), Arg::In(&lse), Arg::In(&grad), Arg::Out(&mut levels)];
        run("_queries", asked.len(), to_queries.into_iter().chain([Arg::Out(&mut gradient)]).collect());
        let to_keys =
            [Arg::In(&qkv), Arg::In(&lse), Arg::In(&grad), Arg::In(&levels), Arg::Out(&mut gradient)];
        run("_keys", time, to_keys.into_iter().collect());
        let lse = floats(&lse).into_iter().map(f64::from).collect();
        Left { out: decode(element, &out), lse, gradient: decode(element, &gradient) }
    }

    /// Holds them against the definition at one size.
    #[track_caller]
    fn check(&self, element: Element, sizes: Sizes, range: f64, drop: Drop<'_>) {
        self.check_of(element, sizes, 0..sizes[1], range, drop);
    }

    /// The same where the queries at these positions are asked.
    #[track_caller]
    fn check_of(&self, element: Element, sizes: Sizes, asked: Range<usize>, range: f64, drop: Drop<'_>) {
        let [batch, time, heads, depth] = sizes;
        let (width, asking) = (heads * depth, asked.len());
        let qkv = random(element, batch * time * 3 * width, -range, range, 1);
        let grad = random(element, batch * asking * width, -1.0, 1.0, 2);
        let got = self.run(element, sizes, &asked, &qkv, &grad, drop);
        let device = Device::cpu(1);
        let leaf = Tensor::from_slice(&device, &qkv, [batch, time, 3 * width]).requires_grad();
        let y = leaf.causal_attention_in_steps(heads, drop).narrow(1, asked.start, asking);
        let mut grads = Gradients::default();
        backward(&[(&y, Some(&Tensor::from_slice(&device, &grad, [batch, asking, width])))], &mut grads);
        let want = grads.get(&leaf).unwrap().to_vec::<f64>();
        let what = format!("{} of {sizes:?} at {asked:?}, dropout {:?}", self.name, drop.map(|(p, _)| p));
        // What is rounded on the way, of numbers as large as the sums' terms together.
        let steps = self.steps(element);
        let most = |values: &[f64]| values.iter().fold(1.0f64, |most, x| most.max(x.abs()));
        near(&format!("{what}: output"), element, &got.out, &y.to_vec(), range, steps);
        near(&format!("{what}: gradient"), element, &got.gradient, &want, most(&want), steps);
        let lse: Vec<f64> =
            log_sums(&qkv, sizes).chunks(time).flat_map(|row| row[asked.clone()].to_vec()).collect();
        near(&format!("{what}: lse"), Element::F32, &got.lse, &lse, most(&lse), STEPS);
    }

    /// As [`STEPS`], where shares and slopes are rounded to the type before they are multiplied.
    fn steps(&self, element: Element) -> f64 {
        let per_rounding = match element {
            Element::F32 => 1.0,
            Element::Bf16 => f64::from(1 << 16),
            Element::F16 => f64::from(1 << 13),
        };
        // The output is rounded where the sum of a query's slopes is told from it.
        STEPS + if element == Element::F32 { 0.0 } else { 4.0 * per_rounding }
    }
}

/// The logarithm of the sum of the exponentials of each query's scores.
fn log_sums(qkv: &[f64], [batch, time, heads, depth]: Sizes) -> Vec<f64> {
    let at = |sample: usize, t: usize, group: usize, head: usize| {
        &qkv[(((sample * time + t) * 3 + group) * heads + head) * depth..][..depth]
    };
    let mut sums = Vec::new();
    for (sample, head) in (0..batch).flat_map(|sample| (0..heads).map(move |head| (sample, head))) {
        sums.extend((0..time).map(|query| {
            let score = |key: usize| {
                let pairs = at(sample, query, 0, head).iter().zip(at(sample, key, 1, head));
                pairs.map(|(q, k)| q * k).sum::<f64>() / (depth as f64).sqrt()
            };
            (0..=query).map(|key| score(key).exp()).sum::<f64>().ln()
        }));
    }
    sums
}

fn key(samples: &[u64]) -> DropoutKey {
    DropoutKey::new(5, 1 << 40, 7, samples.into())
}

#[test]
fn it_is_the_definition_at_every_size() {
    if !there_is_a_compiler() {
        return;
    }
    // Parts of a tile, whole ones and several, in positions; parts of a chunk, whole ones and several, in a head's numbers.
    for sizes in [
        [1, 1, 1, 1],
        [2, 3, 3, 5],
        [1, 32, 1, 32],
        [2, 65, 2, 33],
        [1, 130, 1, 64],
        [1, 40, 2, 100],
        [1, 70, 1, 256],
    ] {
        PLAIN.check(Element::F32, sizes, 1.0, None);
    }
    for element in [Element::Bf16, Element::F16] {
        PLAIN.check(element, [2, 70, 2, 20], 1.0, None);
    }
}

#[test]
fn small_matrices_come_to_the_definition_at_every_size() {
    if !there_is_a_compiler() {
        return;
    }
    // Parts of a tile, whole ones and several, in positions; parts of a fragment, whole ones and several, in a head's numbers, of
    // which there are 8 at least.
    for sizes in [
        [1, 1, 1, 8],
        [2, 17, 3, 24],
        [1, 64, 1, 64],
        [2, 70, 2, 40],
        [1, 130, 1, 16],
        [1, 97, 2, 104],
        [1, 64, 1, 128],
        [2, 150, 2, 64],
        [1, 70, 1, 128],
    ] {
        for &element in HALVES.elements {
            HALVES.check(element, sizes, 1.0, None);
        }
    }
}

#[test]
fn some_of_the_queries_are_asked() {
    if !there_is_a_compiler() {
        return;
    }
    let key = key(&[8, 1 << 33]);
    // Before, within, across and behind tiles of either size, and none at all.
    for asked in [0..30, 7..9, 50..100, 96..130, 129..130, 60..60] {
        for drop in [None, Some((0.3, &key))] {
            PLAIN.check_of(Element::F32, [2, 130, 2, 16], asked.clone(), 1.0, drop);
            for &element in HALVES.elements {
                HALVES.check_of(element, [2, 130, 2, 16], asked.clone(), 1.0, drop);
            }
        }
        HALVES.check_of(Element::Bf16, [1, 130, 1, 64], asked.clone(), 1.0, None);
        HALVES.check_of(Element::F16, [1, 130, 1, 128], asked, 1.0, None);
    }
}

#[test]
fn what_it_drops_is_what_the_engine_drops() {
    if !there_is_a_compiler() {
        return;
    }
    let key = key(&[8, 1 << 33]);
    for sizes in [[2, 1, 1, 4], [2, 67, 3, 9]] {
        PLAIN.check(Element::F32, sizes, 1.0, Some((0.3, &key)));
    }
    for &element in HALVES.elements {
        HALVES.check(element, [2, 67, 3, 16], 1.0, Some((0.3, &key)));
    }
    HALVES.check(Element::Bf16, [1, 40, 1, 72], 1.0, Some((0.6, &self::key(&[3]))));
    // Positions of which four keys have a block of random numbers to themselves, which lanes make for each other.
    HALVES.check(Element::F16, [2, 132, 1, 24], 1.0, Some((0.4, &key)));
    // Some of the heads drop what they drop among all: the definition knows how.
    let part = DropoutKey { within: Some(Within { dim: 1, start: 2, of: 5 }), ..key };
    PLAIN.check(Element::F32, [2, 35, 2, 8], 1.0, Some((0.5, &part)));
}

#[test]
fn what_it_keeps_of_few_may_be_more_than_16_bits_hold() {
    if !there_is_a_compiler() {
        return;
    }
    let device = Device::cpu(1);
    // Few shares are kept, which count as many times as much: what is kept of the largest is more than a float16 can be where a query sees
    // itself alone, and less where queries see many keys. An output may be neither too large nor nothing.
    for ((p, sizes), kept) in
        [((0.999_984_85, [1, 1, 64, 8]), 65_505.0..70_000.0), ((0.99999, [1, 132, 2, 8]), 500.0..5000.0)]
    {
        let [batch, time, heads, depth] = sizes;
        let shape = [batch, time, 3 * heads * depth];
        let is_kept = |key: &DropoutKey| {
            // The values are 1, so an output is what is kept of its query's shares.
            let ones = Tensor::from_slice(&device, &vec![1.0f64; shape.iter().product()], shape);
            let all = ones.causal_attention_in_steps(heads, Some((p, key))).to_vec::<f64>();
            kept.contains(&all.into_iter().fold(0.0, f64::max))
        };
        let key = (0..).map(|sample| key(&[sample])).find(is_kept).unwrap();
        for &element in HALVES.elements {
            HALVES.check(element, sizes, 0.5, Some((p, &key)));
        }
        PLAIN.check(Element::F16, sizes, 0.5, Some((p, &key)));
    }
}

#[test]
fn scores_of_any_size_are_shared_out() {
    if !there_is_a_compiler() {
        return;
    }
    // Scores of tens of thousands: their exponentials alone would be infinite.
    let (sizes, width) = ([1, 80, 1, 32], 32);
    for kind in [PLAIN, HALVES] {
        for &element in kind.elements {
            let qkv = random(element, 80 * 3 * width, -300.0, 300.0, 1);
            let grad = random(element, 80 * width, -1.0, 1.0, 2);
            let Left { out, lse, gradient } = kind.run(element, sizes, &(0..sizes[1]), &qkv, &grad, None);
            assert!(
                out.iter().chain(&lse).chain(&gradient).all(|x| x.is_finite()),
                "{}, {element:?}",
                kind.name
            );
            // The first position sees itself alone.
            assert_eq!(out[..width], qkv[2 * width..3 * width], "{}, {element:?}", kind.name);
        }
    }
}

/// What a query sees that is no number makes its output none, and so the gradients of what it sees; what isn't seen stays out of it, and so
/// do queries that aren't there.
#[test]
fn what_is_no_number_goes_to_whoever_sees_it() {
    if !there_is_a_compiler() {
        return;
    }
    const TIME: usize = 70;
    for (kind, depth, bad, at) in [PLAIN, HALVES].into_iter().flat_map(|kind| {
        let bad = [(f64::NAN, 40), (f64::INFINITY, 40), (f64::INFINITY, 62), (f64::NEG_INFINITY, 62)];
        bad.into_iter().flat_map(move |(bad, at)| [64, 24, 128].map(|depth| (kind, depth, bad, at)))
    }) {
        let (sizes, asked) = ([1, TIME, 1, depth], 3..60);
        let mut qkv = random(Element::Bf16, TIME * 3 * depth, -1.0, 1.0, 1);
        let grad = random(Element::Bf16, asked.len() * depth, -1.0, 1.0, 2);
        // Of a key.
        qkv[(at * 3 + 1) * depth + 5] = bad;
        let got = kind.run(Element::Bf16, sizes, &asked, &qkv, &grad, None);
        let what = format!("{}, {depth}, {bad} at {at}", kind.name);
        for (i, query) in asked.clone().enumerate() {
            let is_none = got.out[i * depth..][..depth].iter().any(|x| x.is_nan());
            assert!(query >= at || !is_none, "{what}: query {query}");
            // An infinite key is the largest or the smallest of scores.
            assert!(query < at || is_none || !bad.is_nan(), "{what}: query {query}");
        }
        for key in asked.end..TIME {
            let own = &got.gradient[(key * 3 + 1) * depth..][..2 * depth];
            assert!(own.iter().all(|x| *x == 0.0), "{what}: key {key}, which nobody sees: {own:?}");
        }
    }
}

#[test]
fn nothing_is_launched_for_nothing() {
    if !there_is_a_compiler() {
        return;
    }
    for (kind, sizes) in
        [PLAIN, HALVES].into_iter().flat_map(|kind| [[0, 4, 2, 8], [2, 0, 2, 8]].map(|s| (kind, s)))
    {
        let Left { out, lse, gradient } = kind.run(kind.elements[0], sizes, &(0..sizes[1]), &[], &[], None);
        assert!(out.is_empty() && lse.is_empty() && gradient.is_empty());
    }
}
