//! How near a kernel's result must be to the reference.

use phalanx_cuda::Element;

/// Rounding to the nearest of a type, as a share of the number: half a step of its fraction.
const fn rounding(element: Element) -> f64 {
    match element {
        Element::F32 => 1.0 / (1 << 24) as f64,
        Element::Bf16 => 1.0 / (1 << 8) as f64,
        Element::F16 => 1.0 / (1 << 11) as f64,
    }
}

/// Half a step of the smallest numbers of a type.
const fn smallest(element: Element) -> f64 {
    match element {
        // Float32 has these numbers too, but the functions of a GPU's library may lose some of their bits.
        Element::F32 | Element::Bf16 => 1.2e-38,
        Element::F16 => 1.0 / (1 << 25) as f64,
    }
}

/// Compares what a kernel wrote with the reference in float64. `steps` is how many roundings of float32, of a number as large as
/// `scale`, the kernel's way to the result may take; the result itself is rounded once more to its type.
#[track_caller]
pub(crate) fn near(what: &str, element: Element, got: &[f64], want: &[f64], scale: f64, steps: f64) {
    assert_eq!(got.len(), want.len(), "{what} for {element:?}");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        if want.is_nan() || want.is_infinite() {
            assert!(
                got.is_nan() == want.is_nan() && (want.is_nan() || got == want),
                "{what} for {element:?}, {i}: {got}, not {want}"
            );
            continue;
        }
        let allowed = rounding(element) * want.abs() + steps * rounding(Element::F32) * want.abs().max(scale);
        let allowed = allowed + smallest(element);
        assert!(
            (got - want).abs() <= allowed,
            "{what} for {element:?}, {i}: {got}, not {want} (within {allowed:e})"
        );
    }
}
