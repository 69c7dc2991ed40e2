//! Every op forward and backward, over the shapes that the CPU's gradients are checked at.

use crate::rig::rig;
use crate::{cases, edges};

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
