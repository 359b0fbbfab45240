//! The operator's verbs against a running server.

use std::process::{Output, Stdio};

use serde_json::{Value, json};

use crate::support::{Server, run, tidegate};

const RULES: &str =
    "rules: [{name: api, key: [user, route], limits: [5/h], algorithm: fixed_window}]\n";

fn answer(output: &Output) -> Value {
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_block_denies_until_it_is_lifted() {
    let server = Server::start(RULES);
    let entries = json!({"user": "a b/c", "route": "/x"});
    let key = ["api", "a b/c", "/x"];
    let block = [
        &["block"],
        &key[..],
        &["--for", "10min", "--reason", "abuse"],
    ]
    .concat();
    assert!(server.operate(&block).status.success());

    let denied = server.check(&entries);
    assert_eq!(
        (denied.status, &denied.json()["reason"]),
        (429, &json!("blocked"))
    );
    let wait = denied.header("retry-after").parse::<u64>().unwrap();
    assert!((540..=600).contains(&wait), "{wait}");

    let listed = answer(&server.operate(&["blocks"]));
    assert!(listed.to_string().contains("abuse"), "{listed}");
    assert!(
        server
            .operate(&[&["unblock"], &key[..]].concat())
            .status
            .success()
    );
    assert_eq!(
        server.check(&entries).json()["remaining"],
        4,
        "a blocked request is not charged"
    );
    assert!(
        !answer(&server.operate(&["blocks"]))
            .to_string()
            .contains("abuse")
    );
}

#[test]
fn lifting_a_block_that_does_not_stand_is_a_no() {
    let server = Server::start(RULES);
    let output = server.operate(&["unblock", "api", "u1", "/x"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

#[test]
fn inspect_shows_and_reset_forgets() {
    let server = Server::start(RULES);
    let entries = json!({"user": "u1", "route": "/x"});
    server.check(&entries);
    server.check(&entries);
    let seen = answer(&server.operate(&["inspect", "api", "u1", "/x"]));
    assert_eq!(seen["limits"][0]["remaining"], 3, "{seen}");
    assert!(
        server
            .operate(&["reset", "api", "u1", "/x"])
            .status
            .success()
    );
    assert_eq!(server.check(&entries).json()["remaining"], 4);
}

#[test]
fn a_rule_that_is_not_there_is_a_no() {
    let server = Server::start(RULES);
    let output = server.operate(&["inspect", "apy", "u1", "/x"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "tidegate: there is no rule \"apy\"; did you mean \"api\"?\n"
    );
}

#[test]
fn a_key_of_the_wrong_length_is_refused_with_what_it_takes() {
    let server = Server::start(RULES);
    let output = server.operate(&["inspect", "api", "u1"]);
    assert!(!output.status.success());
    let said = [output.stdout, output.stderr].concat();
    assert!(
        String::from_utf8_lossy(&said).contains("route"),
        "{}",
        String::from_utf8_lossy(&said)
    );
}

#[test]
fn no_server_is_trouble_with_advice() {
    let port = crate::support::free_port();
    let address = format!("127.0.0.1:{port}");
    let output = run(&mut tidegate(&["blocks", "--admin", &address]));
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains(&format!("cannot reach the admin door at {address}")),
        "{said}"
    );
    assert!(said.contains("is the server running?"), "{said}");
}

#[test]
fn another_door_is_told_apart() {
    let server = Server::start(RULES);
    let output = run(&mut tidegate(&[
        "blocks",
        "--admin",
        &server.http.to_string(),
    ]));
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("is no admin door"), "{said}");
}

#[test]
fn an_address_may_be_written_as_a_url() {
    let server = Server::start(RULES);
    let url = format!("http://{}/", server.admin);
    let output = run(&mut tidegate(&["blocks", "--admin", &url]));
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn an_output_that_nobody_reads_is_no_trouble() {
    let server = Server::start(RULES);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = tidegate(&["blocks", "--admin", &server.admin.to_string()]);
    let asked = command.stdout(writer).stderr(Stdio::piped()).spawn();
    let output = asked.unwrap().wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn a_token_is_asked_for_and_taken() {
    let server = Server::start(&format!("admin: {{token: s3cret}}\n{RULES}"));
    for (arguments, advice) in [
        (&["blocks"][..], "--token, or in TIDEGATE_ADMIN_TOKEN"),
        (&["blocks", "--token", "wrong"], "has another token"),
    ] {
        let output = server.operate(arguments);
        assert_eq!(output.status.code(), Some(2));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(advice), "{said}");
        assert!(!said.contains("wrong"), "{said}");
    }
    assert!(
        server
            .operate(&["blocks", "--token", "s3cret"])
            .status
            .success()
    );
}
