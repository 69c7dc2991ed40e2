//! Files that PyTorch's `torch.save` wrote (`golden/pth.py`), and such as it never would.

use phalanx_nn::Weights;
use phalanx_tensor::Shape;
use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn read(name: &str) -> Weights {
    Weights::read(&golden(name)).unwrap_or_else(|error| panic!("{error}"))
}

fn error(name: &str) -> String {
    Weights::read(&golden(name)).unwrap_err().to_string()
}

fn sorted(weights: &Weights) -> Vec<(&str, &Shape, &[f32])> {
    let mut all: Vec<_> = weights
        .names()
        .map(|name| {
            let (shape, values) = weights.get(name).unwrap();
            (name, shape, values)
        })
        .collect();
    all.sort_by_key(|(name, ..)| *name);
    all
}

/// The small files, which are also cut and changed.
fn small() -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(golden("pth"))
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(path).unwrap())
        })
        .collect();
    files.sort();
    assert!(files.len() > 10);
    files
}

#[test]
fn the_same_weights_are_read_from_all_formats() {
    let want = read("mnistnet.safetensors");
    for name in ["mnistnet.pth", "mnistnet_legacy.pth"] {
        assert_eq!(sorted(&read(name)), sorted(&want), "{name}");
    }
    // In the order of the state dict.
    let order: Vec<_> =
        ["conv1", "conv2", "fc1", "fc2"].map(|l| [format!("{l}.weight"), format!("{l}.bias")]).concat();
    assert!(read("mnistnet.pth").names().eq(order.iter()));
}

#[test]
fn the_content_tells_the_format_not_the_name() {
    let folder = tempfile::tempdir().unwrap();
    for (name, other) in [("mnistnet.pth", "w.safetensors"), ("mnistnet.safetensors", "w.pth")] {
        let path = folder.path().join(other);
        fs::copy(golden(name), &path).unwrap();
        assert_eq!(Weights::read(&path).unwrap(), read(name));
    }
}

#[test]
fn floats_of_every_dtype_become_float32_and_integers_are_left_out() {
    for name in ["pth/dtypes.pth", "pth/dtypes_legacy.pth"] {
        let weights = read(name);
        let check = |key: &str, want: &[f32]| assert_eq!(weights.get(key).unwrap().1, want, "{name}: {key}");
        check("f32", &[0.1, -1e30, f32::INFINITY]);
        check("f64", &[0.1, -1.5]);
        // The nearest halves; the third is the smallest half there is.
        check("f16", &[0.099_975_586, -65504.0, 2.0_f32.powi(-24), 0.0, f32::NEG_INFINITY]);
        check("bf16", &[0.100_097_656, f32::from_bits(0xf14a_0000)]);
        assert_eq!(weights.names().count(), 4, "{name}");
    }
}

#[test]
fn views_become_tensors_of_their_own() {
    for name in ["pth/views.pth", "pth/views_legacy.pth"] {
        let weights = read(name);
        let check = |key: &str, dims: &[usize], want: &[f32]| {
            assert_eq!(weights.get(key), Some((&Shape::new(dims), want)), "{name}: {key}");
        };
        let whole: Vec<f32> = (0..24_u8).map(f32::from).collect();
        let transposed: Vec<f32> = (0..24).map(|i| whole[i % 4 * 6 + i / 4]).collect();
        check("whole", &[4, 6], &whole);
        check("tied", &[4, 6], &whole);
        check("part", &[2, 3], &[8.0, 9.0, 10.0, 14.0, 15.0, 16.0]);
        check("transposed", &[6, 4], &transposed);
        check("every_second", &[4, 3], &[0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 22.0]);
        check("expanded", &[2, 3], &[0.0, 1.0, 2.0, 0.0, 1.0, 2.0]);
        check("scalar", &[], &[7.0]);
        check("empty", &[0, 3], &[]);
        check("parameter", &[2], &[0.0, 1.0]);
    }
}

#[test]
fn what_is_marked_as_negative_changes_its_sign() {
    let weights = read("pth/negative.pth");
    let get = |key: &str| weights.get(key).unwrap().1.to_vec();
    assert_eq!(get("imaginary"), [0.0, -1.0, -2.0, -3.0]);
    assert_eq!(get("view"), [0.0, -1.0, -2.0, -3.0]);
    assert_eq!(get("plain"), [0.0, 1.0, 2.0, 3.0]);
}

#[test]
fn one_state_dict_is_read_however_it_was_saved() {
    let want = read("pth/protocol3.pth");
    let names: Vec<&str> = want.names().collect();
    assert_eq!(names, ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]);
    assert_eq!(want.get("1.running_var").unwrap().1, [1.0, 1.0]);
    for name in ["protocol4", "protocol5", "protocol4_legacy", "deflated", "big_endian", "ddp"] {
        assert_eq!(read(&format!("pth/{name}.pth")), want, "{name}");
    }
    // These were saved after a step of training. The length of the second name matters: see `Archive::open`.
    let trained = read("pth/checkpoint_model.pth");
    assert!(trained.names().eq(want.names()) && trained != want);
    for name in ["checkpoint_state_dict", "checkpoint_model_state_dict", "checkpoint_net"] {
        assert_eq!(read(&format!("pth/{name}.pth")), trained, "{name}");
    }
}

#[test]
fn what_would_run_code_is_refused_by_its_name() {
    let error = error("hostile.pth");
    assert!(
        error.contains("hostile.pth: not a readable .pth file: the file asks for posix.system"),
        "{error}"
    );
    assert!(error.contains("which no file of weights needs: refused") && error.contains("hint: "), "{error}");
    assert!(!Path::new("hostile-was-run").exists());
}

#[test]
fn files_without_one_state_dict_are_errors_that_say_what_is_there() {
    let check = |name: &str, words: &[&str]| {
        let error = error(&format!("pth/{name}.pth"));
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        assert!(
            error.contains(&format!("{name}.pth: not a readable .pth file: ")) && error.contains("hint: "),
            "{error}"
        );
    };
    check("two", &["several state dicts: model, net", "at the top: model, net, epoch"]);
    check("none", &["no state dict", "at the top: generator, epoch"]);
    check("list", &["it holds a list"]);
    check("module", &["asks for torch.nn.modules.container.Sequential"]);
}

#[test]
fn a_cut_file_is_an_error_at_every_length() {
    for (name, bytes) in small() {
        for len in 0..bytes.len() {
            assert!(Weights::from_bytes(&bytes[..len]).is_err(), "{name}: {len} of {} bytes", bytes.len());
        }
    }
}

/// A legacy file with one tensor `w`, whose call is written by the caller: storage `k` has the four floats 0, 1, 2, 3.
fn with_tensor(call: &[u8]) -> Vec<u8> {
    let mut bytes =
        b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}.\x80\x02}U\x01w".to_vec();
    bytes.extend(call);
    bytes.extend(b"s.\x80\x02]U\x01ka.");
    bytes.extend(4_u64.to_le_bytes());
    bytes.extend([0.0_f32, 1.0, 2.0, 3.0].iter().flat_map(|x| x.to_le_bytes()));
    bytes
}

/// `_rebuild_tensor_v2` with a storage and what the opcodes in `place` make: the offset, the shape and the strides.
fn tensor(storage: &str, place: &[u8]) -> Vec<u8> {
    let start =
        format!("ctorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\n{storage}\nU\x01kU\x03cpuK\x04tQ");
    [start.as_bytes(), place, b"\x89NtR"].concat()
}

#[test]
fn strings_of_python_2_name_tensors_too() {
    let bytes = with_tensor(&tensor("FloatStorage", b"K\x01K\x02\x85K\x02\x85"));
    let weights = Weights::from_bytes(&bytes).unwrap();
    assert_eq!(weights.get("w").unwrap().1, [1.0, 3.0]);
}

#[test]
fn impossible_tensors_are_errors_that_name_them() {
    let check = |storage: &str, place: &[u8], why: &str| {
        let error = Weights::from_bytes(&with_tensor(&tensor(storage, place))).unwrap_err();
        assert!(error.contains("\"w\"") && error.contains(why), "{error}, expected {why}");
    };
    let beyond = "beyond its storage \"k\", which has 4 numbers of torch.float32";
    check("FloatStorage", b"K\x00K\x05\x85K\x01\x85", beyond);
    check("FloatStorage", b"K\x04K\x01\x85K\x01\x85", beyond);
    check("FloatStorage", b"K\x00K\x02K\x02\x86K\x03K\x01\x86", beyond);
    check(
        "FloatStorage",
        b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fK\x03\x85\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85",
        beyond,
    );
    check("FloatStorage", b"J\xff\xff\xff\xffK\x01\x85K\x01\x85", "its offset in the storage is not a size");
    check("FloatStorage", b"K\x00K\x01\x85J\xff\xff\xff\xff\x85", "its strides is not a tuple of sizes");
    check("FloatStorage", b"K\x00NK\x01\x85", "its shape is not a tuple of sizes");
    check("FloatStorage", b"K\x00K\x01\x85K\x01K\x01\x86", "differ in length");
    check("FloatStorage", b"K\x00(K\x01K\x01K\x01K\x01K\x01K\x01K\x01t2", "7 dimensions, the most is 6");
    let huge = b"K\x00\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x10\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x10\x862";
    check("FloatStorage", huge, "more elements than there can be");
    // None, of sizes whose product is more than can be told.
    let empty = b"K\x00K\x00\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x20\x86K\x01K\x01\x86";
    check("FloatStorage", empty, "more elements than there can be");
    // One number, repeated until no memory could hold it.
    check("FloatStorage", b"K\x00J\x00\x00\x00\x7f\x85K\x00\x85", "repeat their numbers more than");
}

#[test]
fn floats_that_are_not_read_are_errors_that_name_the_dtype() {
    let mut bytes = with_tensor(&tensor("ComplexFloatStorage", b"K\x00K\x01\x85K\x01\x85"));
    bytes.extend([0; 16]);
    let error = Weights::from_bytes(&bytes).unwrap_err();
    assert!(error.contains("\"w\" holds torch.complex64, which is not read"), "{error}");
}

#[test]
fn a_storage_that_is_missing_or_cut_is_an_error() {
    let bytes = with_tensor(&tensor("DoubleStorage", b"K\x00K\x01\x85K\x01\x85"));
    let error = Weights::from_bytes(&bytes).unwrap_err();
    assert!(error.contains("storage \"k\" has 32 bytes, and 16 are left"), "{error}");
    let stranger = with_tensor(b"N");
    let error = Weights::from_bytes(&stranger).unwrap_err();
    assert!(error.contains("no tensor refers to storage \"k\""), "{error}");
}

#[test]
fn a_number_that_was_changed_in_an_archive_is_found_by_its_checksum() {
    let mut bytes = fs::read(golden("pth/views.pth")).unwrap();
    let number = 23.0_f32.to_le_bytes();
    let at = bytes.windows(4).position(|four| four == number).unwrap();
    bytes[at] ^= 1;
    let error = Weights::from_bytes(&bytes).unwrap_err();
    assert!(
        error.contains("\"whole\": ") && error.contains("views/data/") && error.contains("checksum"),
        "{error}"
    );
}

proptest! {
    #[test]
    fn no_change_of_a_byte_makes_it_panic(
        file in any::<proptest::sample::Index>(),
        places in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let files = small();
        let mut bytes = file.get(&files).1.clone();
        for (place, byte) in places {
            let i = place.index(bytes.len());
            bytes[i] = byte;
        }
        let _ = Weights::from_bytes(&bytes);
    }
}
