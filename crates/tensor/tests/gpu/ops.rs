//! Every op forward and backward, over the shapes that the CPU's gradients are checked at.

use crate::cases::Check;
use crate::rig::rig;
use crate::{cases, edges};
use phalanx_tensor::Conv2dOptions;

/// One row a family of operations.
macro_rules! families {
    ($($family:ident;)*) => {$(
        #[test]
        fn $family() {
            let Some(rig) = rig(1) else { return };
            cases::$family(&rig);
        }
    )*};
}

families! {
    arithmetic_broadcasts;
    functions;
    reductions;
    views;
    products;
    convolutions;
    pooling;
    batch_norm;
    dropouts;
    embedding_and_norm;
    a_value_used_twice_gets_both_gradients;
    softmaxes;
    losses;
}

#[test]
fn known_values() {
    let Some(rig) = rig(1) else { return };
    edges::known_values(&rig);
}

#[test]
fn nan_is_seen_not_lost() {
    let Some(rig) = rig(1) else { return };
    edges::nan_is_seen_not_lost(&rig);
}

#[test]
fn gradients_go_where_pytorchs_go_at_nan_zero_and_ties() {
    let Some(rig) = rig(1) else { return };
    edges::gradients_go_where_pytorchs_go_at_nan_zero_and_ties(&rig);
}

#[test]
fn a_bias_that_the_library_does_not_add_is_added_after_it() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    fake.cudnn().fail("cudnnBackendCreateDescriptor", 1, 3000);
    for _ in 0..2 {
        rig.check(&[&[2, 3, 5, 4], &[6, 3, 3, 3], &[6]], |x| {
            x[0].conv2d(&x[1], Some(&x[2]), Conv2dOptions::default())
        });
    }
}
