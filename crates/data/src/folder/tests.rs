use super::*;
use crate::images::COLOURS;
use proptest::prelude::*;
use std::os::unix::fs::PermissionsExt;

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
    let find = |marker: u8| jpeg.windows(2).position(|pair| pair == [0xff, marker]).unwrap();
    let (frame, tables) = (find(0xc0), find(0xc4));
    let changed = |changes: &[(usize, u8)]| {
        let mut file = jpeg.clone();
        changes.iter().for_each(|&(at, byte)| file[at] = byte);
        file
    };
    let rows: &[(&[u8], &str)] = &[
        (b"", "the file is empty"),
        (b"GIF89a", "neither a JPEG nor a PNG file, so convert it: it begins with 47 49 46 38"),
        (&jpeg[..jpeg.len() / 2], "the JPEG is cut off"),
        (&jpeg[..jpeg.len() - 2], "the JPEG is cut off"),
        (&jpeg[..2], "the JPEG is cut off: it ends before the image begins"),
        (&jpeg[..100], "the JPEG is cut off: it ends before the image begins"),
        (&changed(&[(frame + 4, 12)]), "a JPEG of 12 bits a channel: convert it to 8"),
        (&changed(&[(frame + 9, 2)]), "a JPEG of 2 colours: convert it to RGB"),
        (&changed(&[(frame + 7, 0), (frame + 8, 0)]), "an image without pixels: its size is 37x0"),
        (&changed(&[(frame + 7, 255)]), "an image of 37x65333 pixels: at most 16384 on a side"),
        (
            &changed(&[(frame + 1, 0xc3)]),
            "a JPEG of a rare kind (SOF3): save it as a baseline or progressive one",
        ),
        (&changed(&[(frame + 1, 0xfe)]), "broken JPEG: it has no header that tells its size"),
        (&changed(&[(frame + 3, 4)]), "broken JPEG: the header that tells its size is too short"),
        (&changed(&[(tables + 4, 0xee)]), "broken JPEG: its data can't be decoded ("),
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

#[test]
fn what_lies_behind_a_jpeg_says_nothing_of_it() {
    for name in ["baseline.jpg", "progressive.jpg"] {
        let jpeg = golden(name);
        // Both markers come by chance in what a phone puts there, in any order.
        for behind in [&[][..], &[0xff, 0xda, 1, 2], &[0xff, 0xd9, 7, 0xff, 0xda, 9], &[0; 10]] {
            assert_eq!(decoded(&[&jpeg[..], behind].concat()), decoded(&jpeg), "{name}, {behind:?}");
        }
        let cut = [&jpeg[..jpeg.len() / 2], &[0; 10]].concat();
        assert!(decoded(&cut).unwrap_err().contains("the JPEG is cut off"), "{name}");
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

/// A test run by root may read everything, and then has nothing to see.
fn may_not_read(path: &Path) -> bool {
    let locked = if path.is_dir() { fs::read_dir(path).is_err() } else { fs::read(path).is_err() };
    if !locked {
        eprintln!("SKIPPED: this user may read {} whatever its mode", path.display());
    }
    locked
}

#[test]
fn what_nobody_may_look_at_is_named() {
    // A link to itself is one that even root can't follow.
    for (link, of) in [("train", "train"), ("train/cat", "cat"), ("train/dog/9.png", "9.png")] {
        let root = tree(&[("train/dog/x.png", "grey.png"), ("val/dog/x.png", "grey.png")]);
        let path = root.path().join(link);
        if path.exists() {
            fs::remove_dir_all(&path).unwrap();
        }
        std::os::unix::fs::symlink(of, &path).unwrap();
        let message = ImageFolder::parts(root.path()).unwrap_err().to_string();
        assert!(message.contains(&format!("/{link}: Too many levels of symbolic links")), "{message}");
    }
    for (locked, reason) in [("train", "cannot list"), ("train/dog", "cannot list"), ("val", "cannot list")] {
        let root = tree(&[("train/dog/x.png", "grey.png"), ("val/dog/x.png", "grey.png")]);
        let path = root.path().join(locked);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
        let locks = may_not_read(&path);
        let outcome = ImageFolder::parts(root.path()).map(drop);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        if locks {
            let message = outcome.unwrap_err().to_string();
            let told = [reason, &format!("/{locked}: Permission denied"), "hint: `ls -ld`"];
            assert!(told.iter().all(|part| message.contains(part)), "{message}");
        }
    }
}

#[test]
fn a_link_that_leads_back_has_no_images_of_its_own() {
    let root = tree(&[("train/cat/x.png", "grey.png"), ("train/cat/more/y.png", "grey.png")]);
    for (link, of) in [("all", "."), ("more/up", "..")] {
        std::os::unix::fs::symlink(of, root.path().join("train/cat").join(link)).unwrap();
    }
    assert_eq!(ImageFolder::open(&root.path().join("train")).unwrap().len(), 2);
}

#[test]
fn a_link_to_nothing_and_a_locked_file_are_bad_images_and_a_pipe_is_none() {
    let root = tree(&[("a/locked.png", "grey.png")]);
    std::os::unix::fs::symlink("gone", root.path().join("a/link.png")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(root.path().join("a/pipe.png")).status().unwrap();
    assert!(made.success());
    let locked = root.path().join("a/locked.png");
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o000)).unwrap();
    let folder = ImageFolder::open(root.path()).unwrap();
    assert_eq!(folder.len(), 2);
    let error = |i: usize| folder.image(i, &mut Vec::new()).unwrap_err().to_string();
    assert!(error(0).contains("a/link.png: No such file"), "{}", error(0));
    if may_not_read(&locked) {
        assert!(error(1).contains("a/locked.png: Permission denied"), "{}", error(1));
    }
}

#[test]
fn names_that_are_no_text_are_listed_and_read() {
    use std::os::unix::ffi::OsStrExt;
    let root = tempfile::tempdir().unwrap();
    let class = root.path().join(std::ffi::OsStr::from_bytes(b"cl\xff"));
    fs::create_dir(&class).unwrap();
    fs::write(class.join(std::ffi::OsStr::from_bytes(b"\xfe.PNG")), golden("grey.png")).unwrap();
    let folder = ImageFolder::open(root.path()).unwrap();
    assert_eq!((folder.len(), folder.class_names()), (1, &["cl\u{fffd}".to_owned()][..]));
    assert!(folder.image(0, &mut Vec::new()).is_ok());
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

/// Whoever has some is told when they are read, and doesn't lose them.
#[test]
fn images_of_other_kinds_are_images() {
    let folder = tempfile::tempdir().unwrap();
    let class = folder.path().join("cats");
    fs::create_dir(&class).unwrap();
    for name in ["a.png", "b.webp", "c.TIFF", "d.bmp", "notes.txt", "e.gif", "Thumbs.db"] {
        fs::write(class.join(name), "").unwrap();
    }
    let found = ImageFolder::open(folder.path()).unwrap();
    let names: Vec<String> = found.files.iter().map(|(_, path)| super::name(path)).collect();
    assert_eq!(names, ["a.png", "b.webp", "c.TIFF", "d.bmp"]);
}
