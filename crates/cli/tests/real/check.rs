//! Tests that `tidegate check` accepts a valid file and lists all errors in an invalid file. Also
//! runs `serve` with the same invalid files.

use std::process::Output;

use crate::support::{Scratch, repository, run, tidegate};

/// A file with three errors of different kinds.
const BAD: &str = "\
lisen: {http: 127.0.0.1:0}
rules:
  - name: api
    limits: [20 per minute]
  - name: login
    key: [ip]
    limits:
      - {algorithm: token_bucket, capacity: 0, refill: 1/h}
";

fn check(file: &str) -> Output {
    run(tidegate(&["check", file]).current_dir(repository()))
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn a_valid_file_exits_with_0() {
    let output = check("examples/quickstart.yaml");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        text(&output.stdout),
        "examples/quickstart.yaml: 4 rules, no errors\n"
    );
}

#[test]
fn an_invalid_file_exits_with_1_and_lists_every_mistake() {
    let scratch = Scratch::new();
    let file = scratch.write("bad.yaml", BAD);
    let output = check(file.to_str().unwrap());
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), ""));
    let printed = text(&output.stderr);
    for mistake in [
        "lisen (line 1): ",
        "did you mean `listen`?",
        "rules[0].limits[0] (line 4): expected a rate such as 20/min",
        "rules[1].limits[0].capacity (line 8): must be at least 1, got 0",
    ] {
        assert!(printed.contains(mistake), "no {mistake:?} in:\n{printed}");
    }
    assert!(printed.contains("3 errors"), "{printed}");
}

#[test]
fn a_missing_file_exits_with_2_and_is_named() {
    let output = check("nowhere.yaml");
    assert_eq!(output.status.code(), Some(2));
    let printed = text(&output.stderr);
    assert!(
        printed.starts_with("tidegate: cannot read nowhere.yaml: "),
        "{printed}"
    );
}

#[test]
fn serve_rejects_an_invalid_file_with_the_same_message() {
    let scratch = Scratch::new();
    let file = scratch.write("bad.yaml", BAD);
    let file = file.to_str().unwrap();
    let output = run(&mut tidegate(&["serve", "--config", file]));
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(text(&output.stderr), text(&check(file).stderr));
}

#[test]
fn invalid_arguments_exit_with_2() {
    for args in [
        &["serv"] as &[&str],
        &["check"],
        &["serve", "--port", "1"],
        &[],
    ] {
        let output = run(&mut tidegate(args));
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains("Usage: tidegate"), "{args:?}");
    }
}

/// If the file was written for envoyproxy/ratelimit, the message contains the command that checks
/// envoyproxy/ratelimit's files.
#[test]
fn an_envoyproxy_ratelimit_file_is_recognized() {
    let scratch = Scratch::new();
    let shop =
        "domain: shop\ndescriptors: [{key: a, rate_limit: {unit: hour, requests_per_unit: 1}}]\n";
    let file = scratch.write("shop.yaml", shop);
    let file = file.to_str().unwrap();
    let hint = format!("check it with `tidegate check --envoy {file}`");
    let output = check(file);
    let printed = text_of(&output);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains(&hint), "{printed}");
    let output = run(&mut tidegate(&["serve", "--config", file]));
    assert!(text_of(&output).contains(&hint), "{output:?}");
    let output = run(&mut tidegate(&["check", "--envoy", file]));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    // A directory is not a valid rules file either.
    let output = check(scratch.path().to_str().unwrap());
    let printed = text_of(&output);
    assert_eq!(output.status.code(), Some(2), "{printed}");
    assert!(printed.contains("pass it with --envoy"), "{printed}");
    let other = scratch.write("other.yaml", "domain: shop\n");
    let printed = text_of(&check(other.to_str().unwrap())).to_owned();
    assert!(!printed.contains("--envoy"), "{printed}");
}

fn text_of(output: &Output) -> &str {
    text(&output.stderr)
}

/// The file may be checked on a machine other than the server, so missing files are neither errors
/// nor warnings.
#[test]
fn missing_files_and_variables_are_notes() {
    let scratch = Scratch::new();
    let head = "admin: {token_env: TIDEGATE_TEST_UNSET}\n";
    let tls = "tls: {certificate: /nowhere/crt.pem, key: /nowhere/key.pem}";
    let file = format!(
        "{head}grpc: {{{tls}}}
geoip: {{country: /nowhere/c.mmdb}}
store: {{redis: 'rediss://127.0.0.1:1', tls: {{ca: /nowhere/redis.pem}}}}
proxy:
  listen: 127.0.0.1:0
  {tls}
  access_log: /nowhere/access.log
  upstreams: [{{name: app, urls: 'https://127.0.0.1:1', ca: /nowhere/ca.pem}}]
"
    );
    let file = scratch.write("elsewhere.yaml", &file);
    let output = check(file.to_str().unwrap());
    let printed = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{printed}");
    let lines: Vec<&str> = printed.lines().collect();
    for (line, names) in lines.iter().zip([
        "grpc.tls.certificate: cannot use /nowhere/crt.pem",
        "proxy.tls.certificate: cannot use /nowhere/crt.pem",
        "`ca` of app: cannot use /nowhere/ca.pem",
        "proxy.access_log: cannot open /nowhere/access.log: No such file",
        "geoip.country: cannot use /nowhere/c.mmdb",
        "store.tls: cannot read /nowhere/redis.pem",
        "admin.token_env: the environment variable TIDEGATE_TEST_UNSET is not set",
    ]) {
        let begins = "tidegate: note: the server would not start on this machine: ";
        assert!(
            line.starts_with(begins) && line.contains(names),
            "{names}: {printed}"
        );
    }
    assert_eq!(lines.len(), 7, "{printed}");
}

/// `--strict` must also work on continuous integration machines, which do not have the server's
/// secrets.
#[test]
fn strict_does_not_need_the_secrets_of_the_server() {
    let scratch = Scratch::new();
    let file = "admin: {token_env: TIDEGATE_TEST_UNSET}
listen: {resp: {address: '127.0.0.1:0', password_env: TIDEGATE_TEST_UNSET_TOO}}
store: {memory: {snapshot: /nowhere/counters.snapshot}}
rules: [{name: login, when: {path: {route: /login}}, key: [ip], limits: [5/min]}]
";
    let file = scratch.write("secret.yaml", file);
    let file = file.to_str().unwrap();
    let check = |arguments: &[&str]| run(&mut tidegate(&[&["check", file], arguments].concat()));
    let output = check(&["--strict"]);
    let printed = text_of(&output);
    assert_eq!(output.status.code(), Some(0), "{printed}");
    for (line, name) in printed.lines().zip([
        "admin.token_env: the environment variable TIDEGATE_TEST_UNSET is not set",
        "listen.resp.password_env: the environment variable TIDEGATE_TEST_UNSET_TOO is not set",
        "a restart would lose the counters",
    ]) {
        let is_note = line.starts_with("tidegate: note: ");
        assert!(is_note && line.contains(name), "{name}: {printed}");
    }
    assert_eq!(printed.lines().count(), 3, "{printed}");
    let json = check(&["--strict", "--format", "json"]);
    let found: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    for found in found.as_array().unwrap() {
        assert_eq!([&found["code"], &found["severity"]], ["machine", "note"]);
    }

    let here = check(&["--this-machine"]);
    assert_eq!(here.status.code(), Some(1), "{here:?}");
    let begins = "tidegate: the server would not start on this machine: admin.token_env";
    assert!(text_of(&here).starts_with(begins), "{here:?}");
}

#[test]
fn with_this_machine_a_snapshot_without_a_folder_is_a_warning() {
    let scratch = Scratch::new();
    let file = "store: {memory: {snapshot: /nowhere/counters.snapshot}}\nrules: []\n";
    let file = scratch.write("nowhere.yaml", file);
    let code = |arguments: &[&str]| {
        let file = ["check", file.to_str().unwrap()];
        run(&mut tidegate(&[&file, arguments].concat()))
            .status
            .code()
    };
    assert_eq!(code(&["--this-machine"]), Some(0));
    assert_eq!(code(&["--strict"]), Some(0));
    assert_eq!(code(&["--strict", "--this-machine"]), Some(1));
}

#[test]
fn a_snapshot_in_a_missing_folder_is_a_note() {
    let scratch = Scratch::new();
    let path = scratch.join("nowhere/counters.snapshot");
    let rules = format!(
        "store: {{memory: {{snapshot: {}}}}}\nrules: []\n",
        path.display()
    );
    let file = scratch.write("nowhere.yaml", &rules);
    let output = check(file.to_str().unwrap());
    let printed = text(&output.stderr);
    let folder = scratch.join("nowhere");
    let expected = format!(
        "note: on this machine a restart would lose the counters: cannot write the snapshot {}: its folder {}: No such file",
        path.display(),
        folder.display()
    );
    assert!(printed.contains(&expected), "{printed}");
}

#[test]
fn unusable_files_are_notes() {
    let scratch = Scratch::new();
    // Use a directory as an unusable file: even root can neither read it nor append to it.
    let folder = scratch.join("folder");
    std::fs::create_dir_all(&folder).unwrap();
    let folder = folder.display();
    let file = format!(
        "store: {{memory: {{snapshot: {folder}}}}}
proxy: {{listen: 127.0.0.1:0, access_log: {folder}, upstreams: [{{name: app, urls: 'http://127.0.0.1:1'}}]}}
"
    );
    let file = scratch.write("unusable.yaml", &file);
    let output = check(file.to_str().unwrap());
    let printed = text(&output.stderr);
    assert!(
        printed.contains(&format!(
            "proxy.access_log: cannot open {folder}: Is a directory"
        )),
        "{printed}"
    );
    assert!(
        printed.contains(&format!(
            "cannot read the snapshot {folder}: Is a directory"
        )),
        "{printed}"
    );
}

#[test]
fn strict_exits_with_1_on_warnings() {
    let scratch = Scratch::new();
    let rules = "rules: [{name: login, when: {path: /login}, key: [ip], limits: [5/min]}]\n";
    let file = scratch.write("warned.yaml", rules);
    let file = file.to_str().unwrap();
    assert_eq!(check(file).status.code(), Some(0));
    let strict = |file: &str| run(tidegate(&["check", "--strict", file]).current_dir(repository()));
    let output = strict(file);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text_of(&output).contains("warning: rules[0].when.path"),
        "{output:?}"
    );
    assert_eq!(strict("examples/quickstart.yaml").status.code(), Some(0));
    assert_eq!(strict("nowhere.yaml").status.code(), Some(2));
}

/// Regression test: the last line must not report success if the exit code is 1.
#[test]
fn the_last_line_agrees_with_the_exit_code() {
    let scratch = Scratch::new();
    let rule = "rules: [{name: login, when: {path: /login}, limits: [5/min]}]\n";
    let secret = "admin: {token_env: TIDEGATE_TEST_UNSET}\n";
    let snapshot = "store: {memory: {snapshot: /nowhere/counters.snapshot}}\n";
    for (file, options, code, last) in [
        (rule, &[][..], 0, "1 rule, no errors, 1 warning"),
        (
            rule,
            &["--strict"],
            1,
            "1 rule, 1 warning; --strict allows no warnings",
        ),
        (secret, &["--strict"], 0, "0 rules, no errors"),
        (
            secret,
            &["--this-machine"],
            1,
            "0 rules, no errors, but the server would not start on this machine",
        ),
        (
            snapshot,
            &["--this-machine"],
            0,
            "0 rules, no errors, 1 warning",
        ),
        (
            snapshot,
            &["--this-machine", "--strict"],
            1,
            "0 rules, 1 warning; --strict allows no warnings",
        ),
    ] {
        let file = scratch.write("rules.yaml", file);
        let file = file.to_str().unwrap();
        let output = run(&mut tidegate(&[&["check", file], options].concat()));
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        // The summary is on standard output only if the check succeeded.
        let (printed, prefix) = if code == 0 {
            (text(&output.stdout), "")
        } else {
            assert_eq!(text(&output.stdout), "");
            (text_of(&output), "tidegate: ")
        };
        let last = format!("{prefix}{file}: {last}");
        assert_eq!(printed.lines().last(), Some(&*last), "{output:?}");
    }
}

#[test]
fn findings_are_printed_as_json() {
    let scratch = Scratch::new();
    let found = |file: &str| {
        let output = run(tidegate(&["check", "--format", "json", file]).current_dir(repository()));
        assert_eq!(text_of(&output), "");
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code(), found)
    };
    assert_eq!(
        found("examples/quickstart.yaml"),
        (Some(0), serde_json::json!([]))
    );
    let bad = scratch.write("bad.yaml", BAD);
    let (code, list) = found(bad.to_str().unwrap());
    assert_eq!((code, list.as_array().unwrap().len()), (Some(1), 3));
    let first = serde_json::json!({
        "file": bad.to_str().unwrap(),
        "line": 1,
        "path": "lisen",
        "code": "mistake",
        "severity": "error",
        "message": "unknown key `lisen`",
        "advice": "did you mean `listen`?",
    });
    assert_eq!(list[0], first);
    let rules = "rules: [{name: login, when: {path: /login}, key: [ip], limits: [5/min]}]\n";
    let warned = scratch.write("warned.yaml", rules);
    let (code, list) = found(warned.to_str().unwrap());
    assert_eq!(code, Some(0));
    let (first, fields) = (&list[0], ["exact-path", "warning", "rules[0].when.path"]);
    assert_eq!([&first["code"], &first["severity"], &first["path"]], fields);
    let (code, list) = found("nowhere.yaml");
    assert_eq!((code, &list[0]["code"]), (Some(2), &"unreadable".into()));
}

#[test]
fn a_limitador_file_gets_migration_advice() {
    let scratch = Scratch::new();
    let limits = "- namespace: api\n  max_value: 10\n  seconds: 60\n  conditions: []\n  variables: [user_id]\n";
    let file = scratch.write("limits.yaml", limits);
    let output = check(file.to_str().unwrap());
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text_of(&output).contains("a Limitador limits file"),
        "{output:?}"
    );
}
