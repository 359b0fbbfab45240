//! Tests of the manual of the HTTP/1.1 client for upstreams.

use std::{fs, path::Path};

/// A test that the manual cites.
#[derive(Debug)]
struct CitedTest<'m> {
    /// The test's file in the client's folder; `None` for a test in the folder of this file.
    file: Option<&'m str>,
    name: &'m str,
}

/// Returns the tests that `text` cites: the code spans that contain a function name of at least
/// three words. The file of a test is the code span directly before its name.
fn cited_tests(text: &str) -> Vec<CitedTest<'_>> {
    let mut cited = Vec::new();
    let (mut file, mut last) = (None, None);
    // In a split at the backticks, every second part is a code span.
    for (at, part) in text.split('`').enumerate() {
        if at % 2 == 0 {
            file = last.filter(|_| part.trim().is_empty());
            continue;
        }
        let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if part.bytes().all(is_name) && part.matches('_').count() >= 2 {
            cited.push(CitedTest { file, name: part });
        }
        last = part.ends_with(".rs").then_some(part);
    }
    cited
}

/// Returns whether the file or folder at `path` defines a test with this name.
fn defines(path: &Path, name: &str) -> bool {
    let files = if path.is_dir() {
        let entries = fs::read_dir(path).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    } else {
        vec![path.to_owned()]
    };
    let definition = format!("fn {name}(");
    let is_test = |source: String| {
        let before = source.split_once(&definition).map(|(before, _)| before);
        // The attributes are between the function and the empty line before it.
        let attributes = before.and_then(|before| before.rsplit("\n\n").next());
        attributes.is_some_and(|lines| lines.contains("#[test]") || lines.contains("#[tokio::test"))
    };
    files
        .iter()
        .any(|file| fs::read_to_string(file).is_ok_and(is_test))
}

#[test]
fn every_case_in_the_manual_has_a_test() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let client = here.join("../proxy/src/upstream/h1");
    let manual = fs::read_to_string(client.join("README.md")).unwrap();
    let (_, cases) = manual.split_once("\n## Status line\n").unwrap();
    let missing: Vec<_> = cited_tests(cases)
        .into_iter()
        .filter(|test| {
            let folder = || here.join("tests/proxy");
            let path = test.file.map_or_else(folder, |file| client.join(file));
            !defines(&path, test.name)
        })
        .collect();
    assert!(missing.is_empty(), "no such tests: {missing:#?}");
    // A case is an item of a list.
    let cases = cases.split("\n- ").skip(1).map(|rest| {
        let end = rest.find("\n\n").unwrap_or(rest.len());
        &rest[..end]
    });
    let (tested, untested): (Vec<_>, Vec<_>) =
        cases.partition(|case| !cited_tests(case).is_empty());
    assert!(untested.is_empty(), "cases without a test: {untested:#?}");
    assert!(tested.len() > 50, "found only {} cases", tested.len());
}

#[test]
fn a_cited_test_is_a_code_span() {
    let text =
        "- `max_head` (`head.rs`\n  `a_b_c`, `d_e_f`; `Not_a_test`), in `mod.rs` and (`g_h_1`)";
    let cited: Vec<_> = cited_tests(text)
        .into_iter()
        .map(|test| (test.file, test.name))
        .collect();
    let expected = [(Some("head.rs"), "a_b_c"), (None, "d_e_f"), (None, "g_h_1")];
    assert_eq!(cited, expected);
}
