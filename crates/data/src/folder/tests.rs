use super::*;
use crate::images::COLOURS;
use proptest::prelude::*;

fn golden(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)).unwrap()
}

fn decoded(file: &[u8]) -> Result<Vec<u8>, String> {
    let mut planes = Vec::new();
    let [height, width] = decode::decode(file, &mut planes)?;
    assert_eq!(planes.len(), COLOURS * height * width);
    Ok(planes)
}

const FILES: &[&str] =
    &["baseline.jpg", "progressive.jpg", "grey.jpg", "rgb.png", "rgba.png", "palette.png", "bits.png"];

/// Name and fold of the planes, printed by `tests/golden/make.py`.
const PNGS: &[(&str, u64)] = &[
    ("rgb.png", 0x8784198d91d55950),
    ("rgba.png", 0x8784198d91d55950),
    ("grey.png", 0xf1f00591675b70fb),
    ("grey-alpha.png", 0xf1f00591675b70fb),
    ("palette.png", 0xbb46b31f63d76396),
    ("bits.png", 0xf613f5b9f6fe62cd),
];

#[test]
fn png_files_of_every_kind_are_pillows() {
    for (name, expected) in PNGS {
        let planes = decoded(&golden(name)).unwrap();
        let fold = planes.iter().fold(0u64, |h, &byte| h.wrapping_mul(31).wrapping_add(byte.into()));
        assert_eq!(fold, *expected, "{name}");
    }
}

#[test]
fn jpeg_files_are_near_pillows() {
    // Decoders round differently, and interpolate colours of half the size in their own ways.
    for (name, mean_bound, bound) in [("baseline", 1.0, 40), ("progressive", 0.5, 3), ("grey", 0.5, 3)] {
        let planes = decoded(&golden(&format!("{name}.jpg"))).unwrap();
        let expected = golden(&format!("{name}.npy"));
        let expected = &expected[expected.len() - planes.len()..];
        let plane = planes.len() / COLOURS;
        let difference =
            |i: usize| (i16::from(planes[i]) - i16::from(expected[i % plane * COLOURS + i / plane])).abs();
        let mean = (0..planes.len()).map(|i| f64::from(difference(i))).sum::<f64>() / planes.len() as f64;
        let largest = (0..planes.len()).map(difference).max().unwrap();
        assert!(mean < mean_bound && largest <= bound, "{name}: {mean} on average, {largest} at most");
    }
}

#[test]
fn what_cannot_be_decoded_says_why() {
    let (jpeg, png) = (golden("baseline.jpg"), golden("rgb.png"));
    let mut broken = png.clone();
    let middle = broken.len() / 2;
    broken[middle] ^= 0x55;
    let rows: &[(&[u8], &str)] = &[
        (b"", "the file is empty"),
        (b"GIF89a", "neither a JPEG nor a PNG file: it begins with 47 49 46 38"),
        (&jpeg[..jpeg.len() / 2], "the JPEG is cut off"),
        (&jpeg[..jpeg.len() - 2], "the JPEG is cut off"),
        (&jpeg[..100], "broken JPEG"),
        (&png[..png.len() / 2], "the PNG is cut off"),
        (&png[..20], "the PNG is cut off"),
        (&broken, "broken PNG"),
        (&golden("cmyk.jpg"), "a JPEG of CMYK colours: convert it to RGB"),
        (&golden("sixteen.png"), "a PNG of 16 bits a channel: convert it to 8"),
    ];
    for (file, reason) in rows {
        let error = decoded(file).unwrap_err();
        assert!(error.contains(reason), "{error}, not: {reason}");
    }
}

/// Makes files, each a copy of a golden one.
fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, from) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, golden(from)).unwrap();
    }
    root
}

#[test]
fn classes_are_numbered_by_name_and_files_come_in_order() {
    let root = tree(&[
        ("train/dog/2.png", "rgb.png"),
        ("train/dog/10.JPG", "baseline.jpg"),
        ("train/dog/more/1.jpeg", "grey.jpg"),
        ("train/cat/x.png", "grey.png"),
        ("train/dog/notes.npy", "grey.npy"),
        ("train/.hidden/x.png", "grey.png"),
        ("val/dog/y.png", "palette.png"),
        ("test/ant/y.png", "palette.png"),
    ]);
    let (train, val) = ImageFolder::parts(root.path()).unwrap();
    assert_eq!(train.class_names(), ["cat", "dog"]);
    let files: Vec<(u32, String)> = train.files.iter().map(|(class, path)| (*class, name(path))).collect();
    let expected = [(0, "x.png"), (1, "10.JPG"), (1, "2.png"), (1, "1.jpeg")];
    assert_eq!(files, expected.map(|(class, name)| (class, name.to_owned())));
    assert_eq!((val.len(), val.classes(), val.label(0).unwrap()), (1, 2, 1), "a dog, as in training");
    let mut room = Vec::new();
    let image = train.image(2, &mut room).unwrap();
    assert_eq!((image.height, image.width, image.bytes.len()), (37, 53, COLOURS * 37 * 53));
}

#[test]
fn folders_that_are_no_classes_say_what_is_wrong() {
    let cat = ("train/cat/x.png", "grey.png");
    let rows: &[(&[(&str, &str)], &str)] = &[
        (&[], "holds no folder train"),
        (&[cat], "holds no folder test"),
        (&[cat, ("test/x.png", "grey.png")], "test: holds no folders of classes"),
        (&[cat, ("test/cat/x.npy", "grey.npy")], "test/cat: the folder of a class holds no JPEG or PNG file"),
        (
            &[cat, ("val/dog/x.png", "grey.png")],
            "val/dog: a class to be tested that the training images don't have: dog",
        ),
    ];
    for (files, reason) in rows {
        let root = tree(files);
        let message = ImageFolder::parts(root.path()).unwrap_err().to_string();
        assert!(message.contains(reason) && message.contains("\nhint: images lie in DIR/train"), "{message}");
    }
}

#[test]
fn a_bad_image_is_named() {
    let root = tree(&[("a/x.png", "sixteen.png"), ("a/y.png", "rgb.png")]);
    let folder = ImageFolder::open(root.path()).unwrap();
    let error = folder.image(0, &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("a/x.png: a PNG of 16 bits") && error.contains("--skip-bad"), "{error}");
    fs::remove_file(root.path().join("a/y.png")).unwrap();
    let error = folder.image(1, &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("a/y.png: No such file"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_file_makes_it_panic(
        file in 0..FILES.len(),
        cut in proptest::option::of(any::<proptest::sample::Index>()),
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let mut file = golden(FILES[file]);
        for (at, byte) in changes {
            let at = at.index(file.len());
            file[at] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()));
        }
        let _ = decoded(&file);
    }

    #[test]
    fn no_bytes_make_it_panic(mut file in proptest::collection::vec(any::<u8>(), 0..300), png in any::<bool>()) {
        let start: &[u8] = if png { b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" } else { &[0xff, 0xd8, 0xff] };
        file.splice(..0, start.iter().copied());
        let _ = decoded(&file);
    }

    /// Whatever lies in a folder, each of its images is listed once, under its class.
    #[test]
    fn any_names_are_listed(names in proptest::collection::btree_set("[a-zA-Z0-9 .\\-_]{1,8}|\\PC{1,5}", 1..5)) {
        let root = tempfile::tempdir().unwrap();
        let mut images = 0;
        let mut classes = 0;
        for class in names.iter().filter(|name| !name.starts_with('.') && !name.contains(['/', '\0'])) {
            classes += 1;
            fs::create_dir(root.path().join(class)).unwrap();
            for file in &names {
                let file = format!("{file}.png");
                if !file.starts_with('.') && !file.contains(['/', '\0']) {
                    images += 1;
                    fs::write(root.path().join(class).join(file), "").unwrap();
                }
            }
        }
        match ImageFolder::open(root.path()) {
            Ok(folder) => prop_assert_eq!((folder.len(), folder.classes()), (images, classes)),
            Err(_) => prop_assert!(classes == 0 || images == 0),
        }
    }
}
