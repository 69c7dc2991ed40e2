use super::*;
use flate2::{Compression, write::GzEncoder};
use proptest::prelude::*;
use std::fs;
use std::io::Write;

const TEN: &[&str] = &["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"];

fn golden(protocol: u32) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    fs::read(folder.join(format!("batch.{protocol}.pickle"))).unwrap()
}

/// Writes one file as the test part of CIFAR-10 and opens that.
fn test_part(name: &str, bytes: &[u8], bad: BadImages) -> Result<Cifar> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(name), bytes).unwrap();
    Cifar::open(folder.path(), CifarSet::Ten, Part::Test, bad)
}

fn bytes(cifar: &Cifar, i: usize) -> Vec<u8> {
    cifar.image(i, &mut Vec::new()).unwrap().bytes.to_vec()
}

#[test]
fn records_come_in_the_order_of_the_files() {
    for (set, header) in [(CifarSet::Ten, 1), (CifarSet::Hundred, 2), (CifarSet::HundredCoarse, 2)] {
        let folder = tempfile::tempdir().unwrap();
        write_synthetic_cifar(folder.path(), set, 7).unwrap();
        let cifar = Cifar::open(folder.path(), set, Part::Train, BadImages::Refuse).unwrap();
        let whole: Vec<u8> = set
            .files(Part::Train)
            .iter()
            .flat_map(|name| fs::read(folder.path().join(format!("{name}.bin"))).unwrap())
            .collect();
        let records: Vec<&[u8]> = whole.chunks_exact(header + IMAGE).collect();
        assert_eq!(cifar.len(), records.len());
        for (i, record) in records.iter().enumerate() {
            assert_eq!(cifar.label(i).unwrap(), usize::from(record[set.header().1]), "{set:?} {i}");
            assert_eq!(bytes(&cifar, i), record[header..], "{set:?} {i}");
        }
        assert!(Cifar::open(folder.path(), set, Part::Test, BadImages::Refuse).unwrap().len() == 7);
    }
}

#[test]
fn files_are_mapped_and_compressed_ones_unpacked() {
    let folder = tempfile::tempdir().unwrap();
    write_synthetic_cifar(folder.path(), CifarSet::Ten, 3).unwrap();
    let open = || Cifar::open(folder.path(), CifarSet::Ten, Part::Test, BadImages::Refuse).unwrap();
    let raw = folder.path().join("test_batch.bin");
    let mapped = open();
    assert!(matches!(mapped.files[0].bytes, Bytes::Mapped(_)));
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&fs::read(&raw).unwrap()).unwrap();
    fs::write(folder.path().join("test_batch.bin.gz"), encoder.finish().unwrap()).unwrap();
    fs::remove_file(&raw).unwrap();
    let packed = open();
    assert!((0..3).all(|i| bytes(&mapped, i) == bytes(&packed, i)));
}

#[test]
fn pickles_of_every_age_are_read() {
    for protocol in [2, 3, 4] {
        let cifar = test_part("test_batch", &golden(protocol), BadImages::Refuse).unwrap();
        assert_eq!((cifar.label(0).unwrap(), cifar.label(1).unwrap()), (3, 9), "protocol {protocol}");
        let ascending: Vec<u8> = (0..2 * IMAGE).map(|i| i as u8).collect();
        assert_eq!([bytes(&cifar, 0), bytes(&cifar, 1)].concat(), ascending, "protocol {protocol}");
    }
}

#[test]
fn bad_files_are_refused_by_name_and_reason() {
    let record = vec![0; 1 + IMAGE];
    let bad_label = [&record[..], &[10], &record[1..]].concat();
    let hostile = b"cposix\nsystem\n(S'ls'\ntR.".as_slice();
    let rows: &[(&str, &[u8], &str)] = &[
        ("test_batch.bin", b"", "found 0 bytes"),
        ("test_batch.bin", &record[1..], "images of 3073 bytes: found 3072 bytes"),
        ("test_batch.bin", &[&record[..], &[0]].concat(), "found 3074 bytes"),
        ("test_batch.bin", &bad_label, "label of image 1 out of range: expected less than 10, found: 10"),
        ("test_batch", hostile, "posix.system"),
        ("test_batch", &golden(4)[..4000], "not the pickle that was expected"),
        ("test_batch", b"\x80\x02\xff.", "not the pickle that was expected: byte 2"),
        ("test_batch", b"\x80\x02]q\x00.", "expected a dict with labels, found: a list"),
        (
            "test_batch",
            b"(S'labels'\n(lI3\naS'data'\nS'abc'\nd.",
            "data of 1 rows of 3072 bytes, found: bytes",
        ),
        ("test_batch", b"(S'labels'\n(lI-1\nad.", "labels from 0 to 255, found: a list"),
    ];
    for (name, bytes, reason) in rows {
        let Err(error) = test_part(name, bytes, BadImages::Refuse) else { panic!("{reason}: was opened") };
        let message = error.to_string();
        for part in [format!("/{name}: ").as_str(), reason, "\nhint: "] {
            assert!(message.contains(part), "{part} in: {message}");
        }
    }
    let missing = Cifar::open(Path::new("/nowhere"), CifarSet::Ten, Part::Train, BadImages::Refuse);
    assert!(missing.err().unwrap().to_string().contains("/nowhere/data_batch_1.bin"));
    // A label of no class is a bad image, which may be replaced.
    let lenient = test_part("test_batch.bin", &bad_label, BadImages::Replace).unwrap();
    assert!(lenient.label(0).is_ok() && lenient.label(1).is_err());
}

#[test]
fn a_missing_part_of_the_training_images_is_named() {
    let folder = tempfile::tempdir().unwrap();
    write_synthetic_cifar(folder.path(), CifarSet::Ten, 1).unwrap();
    fs::remove_file(folder.path().join("data_batch_3.bin")).unwrap();
    let error = Cifar::open(folder.path(), CifarSet::Ten, Part::Train, BadImages::Refuse).err().unwrap();
    assert!(error.to_string().contains("data_batch_3.bin"), "{error}");
    assert_eq!(TEN.len(), CifarSet::Ten.files(Part::Train).len());
}

#[test]
fn classes_have_the_names_that_lie_beside_the_images() {
    let ten: Vec<String> = (0..10).map(|i| format!("class {i}")).collect();
    let pickle = |key: &str, names: &[String]| {
        let names: String = names.iter().map(|name| format!("S'{name}'\na")).collect();
        format!("(S'{key}'\n(l{names}d.").into_bytes()
    };
    let text = |names: &[String]| format!("{}\n\n", names.join("\n")).into_bytes();
    let hundred: Vec<String> = (0..100).map(|i| format!("fine {i}")).collect();
    let none: &[u8] = b"";
    type Names<'a> = Result<&'a [String], &'a str>;
    let rows: &[(CifarSet, &str, &[u8], Names<'_>)] = &[
        (CifarSet::Ten, "batches.meta.txt", &text(&ten), Ok(&ten)),
        (CifarSet::Ten, "batches.meta", &pickle("label_names", &ten), Ok(&ten)),
        (CifarSet::Hundred, "fine_label_names.txt", &text(&hundred), Ok(&hundred)),
        (CifarSet::Hundred, "meta", &pickle("fine_label_names", &hundred), Ok(&hundred)),
        (
            CifarSet::Ten,
            "batches.meta.txt",
            &text(&ten[1..]),
            Err("the names of 10 classes, found: 9 of them"),
        ),
        (CifarSet::Ten, "batches.meta.txt", none, Err("the names of 10 classes, found: 0 of them")),
        (CifarSet::Ten, "batches.meta", none, Err("not the pickle that was expected: it ends")),
        (
            CifarSet::Ten,
            "batches.meta",
            &pickle("labels", &ten),
            Err("a dict with label_names, found: a dict"),
        ),
        (
            CifarSet::Ten,
            "batches.meta",
            b"(S'label_names'\nI3\nd.",
            Err("a list of names, found: an integer"),
        ),
        (CifarSet::Ten, "batches.meta", b"cos\nsystem\n.", Err("asks for os.system")),
    ];
    for (set, file, bytes, expected) in rows {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(set.class_names(folder.path()).unwrap(), None);
        fs::write(folder.path().join(file), bytes).unwrap();
        match (set.class_names(folder.path()), expected) {
            (Ok(names), Ok(expected)) => assert_eq!(names.unwrap(), *expected, "{file}"),
            (Err(error), Err(reason)) => {
                let message = error.to_string();
                assert!(message.contains(&format!("/{file}: ")) && message.contains(reason), "{message}");
            }
            (found, expected) => panic!("{file}: {found:?}, not {expected:?}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_binary_file_makes_it_panic(n in 0usize..3, more in 0usize..3, seed in any::<u8>()) {
        let file = vec![seed; n * (1 + IMAGE) + more];
        if let Ok(cifar) = test_part("test_batch.bin", &file, BadImages::Replace) {
            prop_assert_eq!((cifar.len(), more), (n, 0));
            prop_assert!((0..n).all(|i| cifar.label(i).is_ok() == (seed < 10) && bytes(&cifar, i).len() == IMAGE));
        }
    }

    #[test]
    fn no_pickle_makes_it_panic(
        protocol in 2u32..5,
        cut in any::<proptest::sample::Index>(),
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..4),
        late in any::<bool>(),
    ) {
        let mut file = golden(protocol);
        // Most bytes are pixels, whose change harms nothing: the structure is at both ends.
        let ends = 300.min(file.len());
        for (at, byte) in changes {
            let at = at.index(ends);
            let at = if late { file.len() - 1 - at } else { at };
            file[at] = byte;
        }
        if cut.index(3) == 0 {
            file.truncate(cut.index(file.len()));
        }
        if let Ok(cifar) = test_part("test_batch", &file, BadImages::Replace) {
            prop_assert!((0..cifar.len()).all(|i| bytes(&cifar, i).len() == IMAGE));
        }
    }
}
