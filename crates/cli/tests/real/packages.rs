//! Checks the published crates' metadata, and a release's file names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};

use serde_json::Value;

use crate::support::{Scratch, repository, run};

/// The valid crates.io categories that the crates use. Publishing a crate with an unknown category
/// fails.
const CATEGORIES: [&str; 11] = [
    "algorithms",
    "asynchronous",
    "command-line-utilities",
    "config",
    "data-structures",
    "database",
    "network-programming",
    "simulation",
    "web-programming",
    "web-programming::http-client",
    "web-programming::http-server",
];

/// Returns the published packages of the workspace, by name.
fn published() -> BTreeMap<String, Value> {
    let output = run(Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--no-deps",
            "--offline",
            "--locked",
            "--format-version",
            "1",
        ])
        .current_dir(repository()));
    assert!(output.status.success(), "{output:?}");
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap().iter();
    packages
        // In this output, `publish` is an empty list for a package with `publish = false`, and null
        // for a published package.
        .filter(|package| package["publish"].is_null())
        .map(|package| (text(&package["name"]).to_owned(), package.clone()))
        .collect()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn texts(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(text).collect()
}

#[test]
fn every_published_crate_has_complete_metadata() {
    let packages = published();
    assert_eq!(packages.len(), 14);
    for (name, package) in &packages {
        assert!(text(&package["description"]).ends_with('.'), "{name}");
        assert_eq!(text(&package["license"]), "MIT OR Apache-2.0", "{name}");
        assert!(text(&package["repository"]).ends_with("/tidegate"));
        let folder = repository().join(text(&package["manifest_path"]));
        let folder = folder.parent().unwrap();
        for file in [text(&package["readme"]), "LICENSE-MIT", "LICENSE-APACHE"] {
            assert!(folder.join(file).is_file(), "{name}: no {file:?}");
        }
        let keywords = texts(&package["keywords"]);
        assert!((1..=5).contains(&keywords.len()), "{name}: {keywords:?}");
        let is_valid = |word: &&str| {
            let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_+".contains(c);
            word.len() <= 20
                && word.starts_with(char::is_alphabetic)
                && word.chars().all(is_allowed)
        };
        assert!(keywords.iter().all(is_valid), "{name}: {keywords:?}");
        let categories = texts(&package["categories"]);
        let are_known = categories.iter().all(|name| CATEGORIES.contains(name));
        assert!(
            are_known && !categories.is_empty(),
            "{name}: {categories:?}"
        );
    }
}

/// A path dependency also needs a version, unless it is a dev-dependency. A dev-dependency without
/// a version is omitted from the published crate, which avoids a dependency cycle.
#[test]
fn the_crates_can_be_published_in_an_order() {
    let packages = published();
    let mut waiting: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (name, package) in &packages {
        let needed = waiting.entry(name).or_default();
        for dependency in package["dependencies"].as_array().unwrap() {
            if dependency["path"].is_null() {
                continue;
            }
            let (other, version) = (text(&dependency["name"]), text(&dependency["req"]));
            if version == "*" {
                assert_eq!(dependency["kind"], "dev", "{name}: {other} has no version");
                continue;
            }
            let expected = format!("={}", text(&packages[other]["version"]));
            assert_eq!(version, expected, "{name}: {other}");
            needed.insert(other);
        }
    }
    while !waiting.is_empty() {
        let ready = |needed: &BTreeSet<&str>| !needed.iter().any(|name| waiting.contains_key(name));
        let next: Vec<&str> = waiting
            .iter()
            .filter(|(_, needed)| ready(needed))
            .map(|(name, _)| *name)
            .collect();
        assert!(
            !next.is_empty(),
            "these crates need each other: {waiting:?}"
        );
        waiting.retain(|name, _| !next.contains(name));
    }
}

/// The download URL must match the file names that `packaging/build` gives to a release's files.
#[test]
fn binstall_downloads_the_archive_that_is_built() {
    let package = &published()["tidegate-cli"];
    let version = text(&package["version"]);
    let build = fs::read_to_string(repository().join("packaging/build")).unwrap();
    let binstall = &package["metadata"]["binstall"];
    assert_eq!(binstall["pkg-fmt"], "tgz");
    let targets = binstall["overrides"].as_object().unwrap();
    let expected = ["aarch64", "x86_64"]
        .into_iter()
        .flat_map(|arch| ["gnu", "musl"].map(|libc| format!("{arch}-unknown-linux-{libc}")));
    assert!(targets.keys().cloned().eq(expected), "{targets:?}");
    for (target, settings) in targets {
        let (arch, _) = target.split_once('-').unwrap();
        let rendered = |template: &str| {
            let values = [
                ("repo", text(&package["repository"])),
                ("version", version),
                ("target-arch", arch),
                ("bin", "tidegate"),
                ("binary-ext", ""),
            ];
            values
                .iter()
                .fold(template.to_owned(), |text, (name, value)| {
                    text.replace(&format!("{{ {name} }}"), value)
                })
        };
        let url = rendered(text(&settings["pkg-url"]));
        let (folder, file) = url.rsplit_once('/').unwrap();
        let repo = text(&package["repository"]);
        assert_eq!(folder, format!("{repo}/releases/download/v{version}"));
        let written = file.replace(version, "$version").replace(arch, "$arch");
        assert!(
            build.contains(&format!("-czf \"$out/{written}\" .")),
            "packaging/build makes no {written}"
        );
        let program = rendered(text(&binstall["bin-dir"]));
        assert!(
            build.contains(&format!("\"$out/tidegate\" \"$root/{program}\"")),
            "the archive has no {program}"
        );
    }
}

#[test]
fn files_for_users_name_the_version_of_the_crates() {
    let version = text(&published()["tidegate-cli"]["version"]).to_owned();
    let read = |name: &str| fs::read_to_string(repository().join(name)).unwrap();
    for (file, line) in [
        (
            "contrib/kubernetes/base/kustomization.yaml",
            format!("    newTag: {version}\n"),
        ),
        (
            "contrib/compose/compose.yaml",
            format!("${{TIDEGATE_IMAGE:-ghcr.io/tidegate/tidegate:{version}}}\n"),
        ),
        ("CHANGELOG.md", format!("\n## [{version}]")),
        ("UPGRADING.md", format!("\n### {version}")),
    ] {
        assert!(read(file).contains(&line), "{file} has no {line:?}");
    }
}

/// Collects the packages for two architectures. For both architectures, the files with the program
/// and the checksums have the same names.
#[test]
fn the_files_of_a_release_have_checksums_and_notes() {
    let scratch = Scratch::new();
    for (arch, program) in [("x86_64", "one"), ("aarch64", "two")] {
        fs::create_dir(scratch.join(arch)).unwrap();
        scratch.write(&format!("{arch}/tidegate"), program);
        scratch.write(&format!("{arch}/tidegate-0.0.0-{arch}-linux.tar.gz"), arch);
        let sums = "sha256sum -- * >SHA256SUMS";
        let output = run(Command::new("sh")
            .args(["-c", sums])
            .current_dir(scratch.join(arch)));
        assert!(output.status.success(), "{output:?}");
    }
    let collect = |out: &str| {
        let folders = ["x86_64", "aarch64"].map(|arch| scratch.join(arch));
        let script = repository().join("packaging/collect");
        run(Command::new(script).arg(scratch.join(out)).args(folders))
    };
    let output = collect("out");
    assert!(output.status.success(), "{output:?}");
    let sums = fs::read_to_string(scratch.join("out/SHA256SUMS")).unwrap();
    let names: Vec<&str> = sums.lines().map(|line| &line[66..]).collect();
    let archives = ["aarch64", "x86_64"].map(|arch| format!("tidegate-0.0.0-{arch}-linux.tar.gz"));
    assert_eq!(names, archives);
    let notes = fs::read_to_string(scratch.join("out/notes.md")).unwrap();
    assert!(notes.contains("### "), "{notes}");

    // If a file has changed since its checksum was computed, this is an error.
    scratch.write("x86_64/tidegate", "changed");
    let output = collect("again");
    assert!(!output.status.success(), "{output:?}");
}
