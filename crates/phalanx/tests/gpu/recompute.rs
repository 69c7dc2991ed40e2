//! Blocks whose forward pass is made once more in the backward pass, made each time and replayed.

use crate::fake::fake;
use crate::{gpu, net, run, run_of, trainer};
use phalanx::parallel::Recomputed;
use phalanx::{Precision, Trainer};
use phalanx_fake_cuda::Count;

/// With a batch norm's running statistics, which move once, and dropout, whose masks are those of the first time.
#[test]
fn what_is_computed_again_has_the_bits_of_what_is_kept_replayed_or_not() {
    let Some(fake) = fake() else { return };
    let blocks = || Recomputed::all_but_the_last(Box::new(net()));
    let cheap = || Recomputed::cheap(Box::new(net()));
    for precision in [Precision::Float32, Precision::Bfloat16] {
        for (graphs, accumulate) in [(false, 1), (true, 1), (true, 2)] {
            let trainer = Trainer { precision, accumulate, steps: Some(5), ..trainer() };
            let (kept, left) = run(&trainer, 1, &|_| gpu(&fake));
            let trainer = Trainer { graphs, ..trainer };
            let before = fake.calls("cuGraphLaunch");
            for (again, is_of_blocks) in [
                (run_of(&blocks, &trainer, 1, &|_| gpu(&fake)), true),
                (run_of(&cheap, &trainer, 1, &|_| gpu(&fake)), false),
            ] {
                let what = format!("{precision}, {graphs}, {accumulate}, blocks: {is_of_blocks}");
                assert_eq!(again.0.losses, kept.losses, "{what}");
                assert!(again.1 == left, "{what}: not the same bits");
            }
            assert_eq!(fake.calls("cuGraphLaunch") > before, graphs);
        }
    }
    assert_eq!((fake.damage(), fake.count(Count::Graphs)), (Vec::new(), 0));
}
