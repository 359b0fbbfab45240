//! Tests of the operator commands against a running server.

use std::process::{Output, Stdio};

use serde_json::{Value, json};

use crate::support::{
    Ask, EVERY_LISTENER, Scratch, Server, authority, run, signed, tidegate, tool,
};

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

    let listed = answer(&server.operate(&["blocks", "--json"]));
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
        !answer(&server.operate(&["blocks", "--json"]))
            .to_string()
            .contains("abuse")
    );
}

#[test]
fn a_block_by_entries_has_a_rule_an_end_and_a_reason() {
    let server = Server::start(RULES);
    let entries = json!({"user": "acme", "route": "/x"});
    let allowed = |entries: &Value| server.check(entries).status == 200;
    let of_api = ["--entry", "user=acme", "--rule", "api"];
    let until = [
        &["block"],
        &of_api[..],
        &["--until", "2035-01-01T00:00:00Z", "--json"],
    ]
    .concat();
    let blocked = answer(&server.operate(&until));
    assert_eq!(
        (&blocked["rule"], &blocked["until"]),
        (&json!("api"), &json!("2035-01-01T00:00:00Z"))
    );
    let denied = server.check(&entries).json();
    assert_eq!(
        (&denied["reason"], &denied["rule"]),
        (&json!("blocked"), &json!("api"))
    );
    // Without the route, rule `api` does not apply.
    assert!(allowed(&json!({"user": "acme"})));
    let other = [
        "block",
        "--entry",
        "user=initech",
        "--for",
        "10min",
        "--reason",
        "abuse",
    ];
    assert!(server.operate(&other).status.success());
    let denied = server.check(&json!({"user": "initech"})).json();
    assert_eq!(
        (&denied["reason"], &denied["rule"]),
        (&json!("blocked"), &Value::Null)
    );
    for (search, expected) in [("acme", "(acme)"), ("abuse", "(initech)"), ("nobody", "")] {
        let listed = answer(&server.operate(&["blocks", "--search", search, "--json"]));
        let blocks = listed["entry_blocks"].as_array().unwrap().iter();
        let users: String = blocks
            .map(|block| format!("({})", block["entries"]["user"].as_str().unwrap()))
            .collect();
        assert_eq!(users, expected, "{search}");
    }
    let explained = server.operate(&["explain", "user=initech"]);
    let explained = String::from_utf8(explained.stdout).unwrap();
    assert!(explained.starts_with("denied (blocked), "), "{explained}");
    assert!(
        explained.contains("\nblocked user=initech until "),
        "{explained}"
    );
    let denials = server.operate(&["denials"]);
    let denials = String::from_utf8(denials.stdout).unwrap();
    assert!(!denials.contains("(sent with the request)"), "{denials}");
    let unblock = [&["unblock"], &of_api[..]].concat();
    assert!(server.operate(&unblock).status.success());
    assert!(allowed(&entries));
}

/// After a rule is renamed, blocks that were set under its former name are no longer enforced.
/// Regression test: the list of blocks must contain such a block with its rule and key, and
/// operators must be able to lift it.
#[test]
fn blocks_of_a_renamed_rule_are_named_and_can_be_lifted() {
    let server = Server::start(RULES);
    let key = ["api", "u1", "/x"];
    let block = [&["block"], &key[..], &["--reason", "abuse"]].concat();
    assert!(server.operate(&block).status.success());
    let renamed = format!("{EVERY_LISTENER}{}", RULES.replace("api", "public-api"));
    std::fs::write(server.rules_file(), renamed).unwrap();
    let reloaded = printed(&server.operate(&["reload"]));
    assert!(
        reloaded.starts_with(
            "reloaded: 1 rules\nnote: 1 block is inactive, because its rule no longer exists or has another \
             key: \"api\"; "
        ),
        "{reloaded}"
    );
    let blocks = printed(&server.operate(&["blocks"]));
    assert!(
        blocks.contains("\napi (rule no longer exists)  u1, /x  "),
        "{blocks}"
    );
    assert!(
        blocks.contains("\nnote: inactive blocks deny no requests: the rule was removed"),
        "{blocks}"
    );
    let lifted = printed(&server.operate(&[&["unblock"], &key[..]].concat()));
    assert_eq!(lifted, "unblocked api u1, /x\n");
    assert_eq!(printed(&server.operate(&["blocks"])), "no blocks\n");
    let reloaded = printed(&server.operate(&["reload"]));
    assert_eq!(reloaded, "reloaded: 1 rules\n");
}

#[test]
fn a_shorter_block_is_refused_and_a_longer_one_names_what_it_replaced() {
    let server = Server::start(RULES);
    let block = |more: &[&str]| {
        let arguments = [&["block", "api", "u1", "/x"], more].concat();
        server.operate(&arguments)
    };
    assert!(
        block(&["--for", "1d", "--reason", "abuse"])
            .status
            .success()
    );
    let refused = block(&[]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let message = String::from_utf8_lossy(&refused.stderr);
    assert!(
        message
            .starts_with("tidegate: cannot block api u1, /x: the key is already blocked until 2")
            && message.contains("pass --shorten"),
        "{message}"
    );
    let longer = printed(&block(&["--for", "forever"]));
    let mut lines = longer.lines();
    assert_eq!(lines.next(), Some("blocked api u1, /x until it is lifted"));
    let replaced = lines.next().unwrap();
    assert!(
        replaced.starts_with("replaced the block until 2") && replaced.ends_with(": abuse"),
        "{replaced}"
    );
    let shortened = printed(&block(&["--for", "1min", "--shorten"]));
    assert!(
        shortened.contains("\nreplaced the block until it is lifted\n"),
        "{shortened}"
    );
    let json = answer(&block(&["--for", "2min", "--json"]));
    assert!(json["replaced"]["until"].is_string(), "{json}");
}

#[test]
fn a_shortened_block_keeps_its_reason() {
    let server = Server::start(RULES);
    let block = |more: &[&str]| {
        let arguments = [&["block", "api", "u1", "/x", "--json"], more].concat();
        answer(&server.operate(&arguments))["reason"].clone()
    };
    assert_eq!(block(&["--for", "1d", "--reason", "abuse"]), "abuse");
    assert_eq!(block(&["--for", "1min", "--shorten"]), "abuse");
}

#[test]
fn unblocking_a_key_that_is_not_blocked_exits_with_1() {
    let server = Server::start(RULES);
    let output = server.operate(&["unblock", "api", "u1", "/x"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

#[test]
fn inspect_shows_counters_and_reset_clears_them() {
    let server = Server::start(RULES);
    let entries = json!({"user": "u1", "route": "/x"});
    server.check(&entries);
    server.check(&entries);
    let seen = answer(&server.operate(&["inspect", "api", "u1", "/x", "--json"]));
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
fn an_unknown_rule_exits_with_1() {
    let server = Server::start(RULES);
    let output = server.operate(&["inspect", "apy", "u1", "/x"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "tidegate: there is no rule \"apy\"; did you mean \"api\"?\n"
    );
}

#[test]
fn a_key_of_the_wrong_length_is_rejected_with_the_expected_entries() {
    let server = Server::start(RULES);
    let output = server.operate(&["inspect", "api", "u1"]);
    assert!(!output.status.success());
    let message = [output.stdout, output.stderr].concat();
    assert!(
        String::from_utf8_lossy(&message).contains("route"),
        "{}",
        String::from_utf8_lossy(&message)
    );
}

#[test]
fn an_unreachable_server_exits_with_2_and_advice() {
    let port = crate::servers::reserve_port();
    let address = format!("127.0.0.1:{port}");
    let output = run(&mut tidegate(&["blocks", "--admin", &address]));
    assert_eq!(output.status.code(), Some(2));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        message.contains(&format!("cannot reach the admin endpoint at {address}")),
        "{message}"
    );
    assert!(message.contains("is the server running?"), "{message}");
}

#[test]
fn another_listener_is_recognized() {
    let server = Server::start(RULES);
    let output = run(&mut tidegate(&[
        "blocks",
        "--admin",
        &server.http.to_string(),
    ]));
    assert_eq!(output.status.code(), Some(2));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        message.contains("is not a Tidegate admin endpoint"),
        "{message}"
    );
}

#[test]
fn the_address_may_be_a_url() {
    let server = Server::start(RULES);
    let url = format!("http://{}/", server.admin);
    let output = run(&mut tidegate(&["blocks", "--admin", &url]));
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn the_address_may_be_a_port() {
    let server = Server::start(RULES);
    let port = server.admin.port().to_string();
    let output = run(&mut tidegate(&["blocks", "--admin", &port]));
    assert!(output.status.success(), "{output:?}");
}

/// Errors contain the complete address that was used, even if `--admin` contains only a part of it.
#[test]
fn errors_name_the_complete_address() {
    let port = crate::servers::reserve_port();
    for (given, expected) in [
        (port.to_string(), format!("at 127.0.0.1:{port}: ")),
        (
            format!("http://127.0.0.1:{port}/"),
            format!("at 127.0.0.1:{port}: "),
        ),
        (
            "nowhere.invalid".to_owned(),
            "at nowhere.invalid:8082: ".to_owned(),
        ),
    ] {
        let output = run(&mut tidegate(&["blocks", "--admin", &given]));
        assert_eq!(output.status.code(), Some(2));
        let message = String::from_utf8_lossy(&output.stderr);
        let begins = "tidegate: cannot list the blocks: cannot reach the admin endpoint ";
        assert!(
            message.starts_with(&format!("{begins}{expected}")),
            "{message}"
        );
    }
}

/// Accepts one connection, reads the request, sends `response` and closes the connection. Returns
/// the standard error of `tidegate blocks`.
fn blocks_of_a_program_that_sends(response: &'static [u8]) -> String {
    use std::io::{Read as _, Write as _};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // The client may connect again to probe whether the listener uses TLS.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            assert!(stream.read(&mut [0; 4_096]).unwrap() > 0);
            // The client may have closed the connection.
            let _ = stream.write_all(response);
        }
    });
    let output = run(&mut tidegate(&["blocks", "--admin", &address]));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let message = String::from_utf8(output.stderr).unwrap();
    let begins =
        format!("tidegate: cannot list the blocks: cannot reach the admin endpoint at {address}: ");
    let problem = message.strip_prefix(&begins);
    problem.unwrap_or_else(|| panic!("{message}")).to_owned()
}

/// Errors must not contain messages from libraries or the operating system, which mean nothing to
/// an operator. Errors must contain advice about TLS only if the problem is about TLS.
#[test]
fn connection_errors_are_in_plain_words() {
    let is_it = "does the admin listener have this address? if the admin listener has another address, pass that \
        address with --admin or TIDEGATE_ADMIN\n";
    for (response, expected) in [
        (
            &b""[..],
            format!("the connection was closed before the response was complete; {is_it}"),
        ),
        (
            b"-ERR unknown command 'GET'\r\n",
            format!("the program at this address does not respond with HTTP; {is_it}"),
        ),
        (
            // The TLS alert `unexpected_message`.
            b"\x15\x03\x01\x00\x02\x02\x0a",
            "the listener at this address uses TLS; if this is the admin listener, pass the CA of its certificate \
             with --admin-ca; otherwise pass the address of the admin listener with --admin\n"
                .to_owned(),
        ),
    ] {
        assert_eq!(blocks_of_a_program_that_sends(response), expected);
    }
    let output = run(&mut tidegate(&["blocks", "--admin", "nowhere.invalid:1"]));
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "tidegate: cannot list the blocks: cannot reach the admin endpoint at nowhere.invalid:1: the host \
         name \"nowhere.invalid\" cannot be resolved; check the host of --admin or TIDEGATE_ADMIN\n"
    );
}

#[test]
fn a_response_that_is_cut_off_is_an_error_in_plain_words() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let other = std::thread::spawn(move || {
        use std::io::{Read as _, Write as _};
        let (mut stream, _) = listener.accept().unwrap();
        assert!(stream.read(&mut [0; 4_096]).unwrap() > 0);
        stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
            .unwrap();
    });
    let output = run(&mut tidegate(&["blocks", "--admin", &address]));
    other.join().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        format!(
            "tidegate: cannot list the blocks: cannot read the response of {address}: the connection was closed \
             before the response was complete; try again, and check the log of the server\n"
        )
    );
}

/// A list of 100,000 blocks exceeds the HTTP client's default limit of 10 MB.
#[test]
fn a_long_list_of_blocks_is_printed() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let other = std::thread::spawn(move || {
        use std::io::{Read as _, Write as _};
        let long = format!("{{\"blocks\": [{}{{}}]}}", "{}, ".repeat(3_000_000));
        // The second request lists the blocks by entries.
        for body in [&*long, "{\"blocks\": []}"] {
            let (mut stream, _) = listener.accept().unwrap();
            assert!(stream.read(&mut [0; 4_096]).unwrap() > 0);
            let length = body.len();
            let head =
                format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
            stream.write_all((head + body).as_bytes()).unwrap();
        }
    });
    let output = run(&mut tidegate(&["blocks", "--admin", &address]));
    other.join().unwrap();
    assert!(output.status.success(), "{:?}", output.stderr);
}

/// Requests must not go through a proxy for web traffic, because the proxy would receive the admin
/// token.
#[test]
fn the_proxies_of_the_environment_are_not_used() {
    let server = Server::start(&format!("admin: {{token: s3cret}}\n{RULES}"));
    let unreachable = format!("http://127.0.0.1:{}", crate::servers::reserve_port());
    let admin = server.admin.to_string();
    let mut command = tidegate(&["blocks", "--admin", &admin, "--token", "s3cret"]);
    for name in [
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "ALL_PROXY",
    ] {
        command.env(name, &unreachable);
    }
    command.env_remove("no_proxy").env_remove("NO_PROXY");
    let output = run(&mut command);
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_closed_output_is_not_an_error() {
    let server = Server::start(RULES);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = tidegate(&["blocks", "--admin", &server.admin.to_string()]);
    let asked = command.stdout(writer).stderr(Stdio::piped()).spawn();
    let output = asked.unwrap().wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

/// Lost output is an error, except if the reader has closed the pipe.
#[test]
fn a_result_that_cannot_be_written_is_an_error() {
    let server = Server::start(RULES);
    let full = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut command = tidegate(&["blocks", "--admin", &server.admin.to_string()]);
    let asked = command.stdout(full).stderr(Stdio::piped()).spawn();
    let output = asked.unwrap().wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(
        message.starts_with("tidegate: cannot write the result to standard output: No space left"),
        "{message}"
    );
}

#[test]
fn help_has_examples_and_exit_codes() {
    let help = printed(&run(&mut tidegate(&["--help"])));
    for part in ["Examples:\n", "Exit codes:\n  0  success", "  1  ", "  2  "] {
        assert!(help.contains(part), "no {part:?} in {help}");
    }
    for command in ["serve", "check", "block", "unblock", "inspect", "reset"] {
        let help = printed(&run(&mut tidegate(&[command, "--help"])));
        assert!(help.contains("Examples:\n  tidegate"), "{help}");
    }
}

#[test]
fn a_wrong_log_filter_is_shown() {
    let output = run(&mut tidegate(&["serve", "--log", "tidegate=loud"]));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("--log: \"tidegate=loud\": "), "{message}");
    assert!(
        message.contains("; use error, warn, info or debug"),
        "{message}"
    );
}

#[test]
fn a_missing_argument_shows_a_usage_that_can_be_followed() {
    for (arguments, expected) in [
        (
            &["block"][..],
            "Usage: tidegate block [OPTIONS] <RULE> [VALUES]...\n",
        ),
        (
            &["inspect"],
            "Usage: tidegate inspect [OPTIONS] <RULE> [VALUES]...\n",
        ),
        (&["reset"], "tidegate reset [OPTIONS] --throttle <KEY>\n"),
        (
            &["serve", "rules.yaml"],
            "pass the rules file with --config: `tidegate serve --config rules.yaml`\n",
        ),
        (
            &["bloks"],
            "tip: some similar subcommands exist: 'block', 'blocks'\n",
        ),
    ] {
        // The usage must not contain the value of an environment variable.
        let output = run(tidegate(arguments).env("TIDEGATE_ADMIN", "18082"));
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.contains(expected), "no {expected:?} in {message}");
    }
}

#[test]
fn the_version_is_printed_with_and_without_dashes() {
    for arguments in ["version", "--version", "-V"] {
        let version = printed(&run(&mut tidegate(&[arguments])));
        let start = format!("tidegate {} (commit ", env!("CARGO_PKG_VERSION"));
        assert!(version.starts_with(&start), "{version}");
        assert!(version.ends_with(", features: telemetry)\n"), "{version}");
    }
}

#[test]
fn the_admin_token_is_required() {
    let server = Server::start(&format!("admin: {{token: s3cret}}\n{RULES}"));
    for (arguments, advice) in [
        (&["blocks"][..], "--token, or in TIDEGATE_ADMIN_TOKEN"),
        (
            &["blocks", "--token", "wrong"],
            "is not the admin token of the server",
        ),
    ] {
        let output = server.operate(arguments);
        assert_eq!(output.status.code(), Some(2));
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.contains(advice), "{message}");
        assert!(!message.contains("wrong"), "{message}");
    }
    assert!(
        server
            .operate(&["blocks", "--token", "s3cret"])
            .status
            .success()
    );
    // An empty variable is treated as no token, not as an invalid token.
    let mut empty = tidegate(&["blocks", "--admin", &server.admin.to_string()]);
    let output = run(empty.env("TIDEGATE_ADMIN_TOKEN", ""));
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(
        message.contains("--token, or in TIDEGATE_ADMIN_TOKEN"),
        "{message}"
    );
}

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn output_is_in_tables() {
    let server = Server::start(RULES);
    assert_eq!(printed(&server.operate(&["blocks"])), "no blocks\n");
    server.check(&json!({"user": "u1", "route": "/x"}));
    let blocked = printed(&server.operate(&["block", "api", "u1", "/x", "--reason", "abuse"]));
    let mut lines = blocked.lines();
    let first = lines.next().unwrap();
    assert!(
        first.starts_with("blocked api u1, /x until 2") && first.contains("Z ("),
        "{first}"
    );
    let note = lines.next().unwrap();
    assert!(
        note.contains("this block is lost when the server restarts"),
        "{note}"
    );
    let blocks = printed(&server.operate(&["blocks"]));
    assert!(blocks.starts_with("RULE  KEY     LEFT"), "{blocks}");
    assert!(
        blocks.contains("api   u1, /x  ") && blocks.contains("abuse"),
        "{blocks}"
    );
    let seen = printed(&server.operate(&["inspect", "api", "u1", "/x"]));
    assert!(
        seen.contains("LIMIT  REMAINING  OF  NEXT REQUEST"),
        "{seen}"
    );
    assert!(
        seen.contains("5/h    4          5   after the block"),
        "{seen}"
    );
    let lifted = printed(&server.operate(&["unblock", "api", "u1", "/x"]));
    assert_eq!(lifted, "unblocked api u1, /x\n");
    let rules = printed(&server.operate(&["rules"]));
    assert!(
        rules.contains("api   enforce  user, route  5/h     {}"),
        "{rules}"
    );
}

#[test]
fn status_is_readable_text() {
    let server = Server::start(RULES);
    let status = printed(&server.operate(&["status"]));
    let version = format!("tidegate {}, up ", env!("CARGO_PKG_VERSION"));
    assert!(status.starts_with(&version), "{status}");
    for part in [
        ", ready\n",
        "memory, 0 keys",
        "1 active, from rules.yaml",
        "http 127.0.0.1:",
    ] {
        assert!(status.contains(part), "no {part:?} in {status}");
    }
    let json = answer(&server.operate(&["status", "--json"]));
    assert_eq!(
        (&json["state"], &json["rules"]),
        (&json!("ready"), &json!(1))
    );
}

#[test]
fn reload_lists_the_mistakes_of_the_file() {
    let server = Server::start(RULES);
    assert_eq!(printed(&server.operate(&["reload"])), "reloaded: 1 rules\n");
    std::fs::write(
        server.rules_file(),
        "rules: [{nam: x}, {name: y, limits: [oops]}]\n",
    )
    .unwrap();
    let refused = server.operate(&["reload"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let message = String::from_utf8(refused.stderr).unwrap();
    assert!(
        message.contains("nam") && message.contains("oops"),
        "{message}"
    );
    let status = server.operate(&["status"]);
    let status = printed(&status);
    assert!(
        status.contains(", degraded\n") && status.contains("nam"),
        "{status}"
    );
}

#[test]
fn preview_names_the_changes_and_what_an_enforced_rule_would_have_denied() {
    let rules = "rules:
  - {name: old, key: [ip], limits: [5/min]}
  - {name: trial, key: [user], limits: [2/h], algorithm: fixed_window, mode: shadow}
  - {name: same, key: [user], limits: [9/min]}
";
    let server = Server::start(rules);
    for _ in 0..5 {
        assert_eq!(server.check(&json!({"user": "ada"})).status, 200);
    }
    let next = "top: off
rules:
  - {name: trial, key: [user], limits: [3/h], algorithm: fixed_window}
  - {name: same, key: [user], limits: [9/min]}
  - {name: new, key: [ip], limits: [7/min]}
";
    let file = server.directory().join("next.yaml");
    std::fs::write(&file, next).unwrap();
    let preview = ["preview", file.to_str().unwrap()];
    let expected = "the file has 3 rules; nothing was applied
added: new
removed: old
changed: trial
  mode: shadow -> enforce
  limits: 2/h -> 3/h
  in the last hour, its current limits would have denied 3 of 5 requests
note: changes to listen, top take effect after a restart or an upgrade
";
    let shown = printed(&server.operate(&preview));
    assert_eq!(
        shown
            .lines()
            .filter(|line| !line.starts_with("warning: "))
            .map(|line| format!("{line}\n"))
            .collect::<String>(),
        expected
    );
    let listed = printed(&server.operate(&["rules"]));
    assert!(
        listed.contains("old") && !listed.contains("new"),
        "{listed}"
    );
    std::fs::write(&file, "rules: [{nam: x}]").unwrap();
    let refused = server.operate(&preview);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let message = String::from_utf8(refused.stderr).unwrap();
    assert!(
        message.contains("cannot be used as the rules file") && message.contains("nam"),
        "{message}"
    );
    let missing = server.operate(&["preview", "nowhere.yaml"]);
    assert_eq!(missing.status.code(), Some(2), "{missing:?}");
}

#[test]
fn reload_and_status_name_the_settings_that_need_a_restart() {
    let server = Server::start(RULES);
    let more = "shutdown: {drain: 3s}\n";
    // Without `listen`, the file has the default listener addresses. The default addresses differ
    // from the addresses of this server.
    std::fs::write(server.rules_file(), format!("{more}{RULES}")).unwrap();
    let expected = "note: changes to listen, shutdown take effect after a restart or an upgrade\n";
    let reloaded = printed(&server.operate(&["reload"]));
    assert_eq!(reloaded, format!("reloaded: 1 rules\n{expected}"));
    let status = printed(&server.operate(&["status"]));
    assert!(status.ends_with(expected), "{status}");
}

#[test]
fn status_says_why_the_snapshot_fails_and_what_to_do() {
    let snapshot = "store: {memory: {snapshot: {path: nowhere/counters.snapshot, every: 1h}}}\n";
    let server = Server::start(&format!("{snapshot}{RULES}"));
    let status = printed(&server.operate(&["status"]));
    for part in [
        "cannot write the snapshot nowhere/counters.snapshot: its folder nowhere: No such file",
        "(since 2",
        "check that the folder exists, that the server is allowed to write to it and that the disk has space",
        "memory, 0 keys in this process, snapshot failing: a restart loses changes since the last snapshot",
    ] {
        assert!(status.contains(part), "no {part:?} in {status}");
    }
    // `store.memory.snapshot` is already set, so the output must not recommend this setting.
    assert!(!status.contains("set store.memory.snapshot"), "{status}");
    assert!(
        server
            .operate(&["block", "api", "u1", "/x"])
            .status
            .success()
    );
    let blocks = printed(&server.operate(&["blocks"]));
    assert!(
        blocks.contains("note: the latest blocks are lost when the server restarts: cannot write"),
        "{blocks}"
    );
    assert!(!blocks.contains("set `store.memory.snapshot`"), "{blocks}");
}

#[test]
fn a_block_that_can_never_deny_is_refused() {
    let server = Server::start("rules: [{name: login, key: [ip], limits: [5/h]}]\n");
    let refused = server.operate(&["block", "login", "10.0.0.0/8"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert_eq!(
        String::from_utf8_lossy(&refused.stderr),
        "tidegate: cannot block login 10.0.0.0/8: key: the listeners count single addresses, not a network of this \
         size: block it with `tidegate block --entry ip=10.0.0.0/8 --rule login --for 1h`; if services send the given \
         form with `raw`, pass --raw (`\"raw\": true`)\n"
    );
    let advised = [
        "block",
        "--entry",
        "ip=10.0.0.0/8",
        "--rule",
        "login",
        "--for",
        "1h",
    ];
    let blocked = printed(&server.operate(&advised));
    assert!(
        blocked.starts_with("blocked ip=10.0.0.0/8 in rule login until"),
        "{blocked}"
    );
    let raw = printed(&server.operate(&["block", "login", "unix", "--raw"]));
    assert!(raw.starts_with("blocked login unix until"), "{raw}");
    assert!(raw.contains("note: \"unix\" is not an IP address"), "{raw}");
    // The block has just been created, so the note must not claim that no such block can exist.
    let network = printed(&server.operate(&["block", "login", "10.0.0.0/8", "--raw"]));
    let note = "note: the listeners count single addresses, not a network of this size: only requests that \
        services send with `raw` have this key; ";
    assert!(network.contains(note), "{network}");
}

/// Users do not know the admin API's paths and status codes, so errors must not refer to them.
#[test]
fn errors_say_what_was_asked_and_what_to_do() {
    let server = Server::start(RULES);
    let free = format!("127.0.0.1:{}", crate::servers::reserve_port());
    let admin = server.admin.to_string();
    let http = server.http.to_string();
    let another = format!("cannot list the rules: {http} is not a Tidegate admin endpoint");
    let refused = format!(
        "cannot reset user:1: cannot reach the admin endpoint at {free}: connection refused: no program listens on \
         this address; is the server running? if the admin listener has another address, pass that address with \
         --admin or TIDEGATE_ADMIN"
    );
    for (arguments, address, expected) in [
        (&["rules"][..], &http, another.as_str()),
        (&["reset", "--throttle", "user:1"], &free, &refused),
        (
            &["status"],
            &"no address".to_owned(),
            "cannot show the status: \"no address\" is not an address; pass HOST:PORT with --admin",
        ),
        (
            &["block", "api", "u1"],
            &admin,
            "cannot block api u1: key: rule \"api\" has a key of 2 values (user, route), got 1",
        ),
        (
            &["block", "api", "u1", "/x", "--for", "soon"],
            &admin,
            "cannot block api u1, /x: --for: expected a duration",
        ),
        (
            &["unblock", "api", "u1", "/x"],
            &admin,
            "this key is not blocked",
        ),
        (
            &["inspect", "nothing"],
            &admin,
            "there is no rule \"nothing\"; the rules are api",
        ),
        (
            &["block", "203.0.113.9", "api"],
            &admin,
            "there is no rule \"203.0.113.9\"; \"api\" is a rule: write the rule before the key",
        ),
        (
            &["blocks", "--token", "a\nb"],
            &admin,
            "cannot list the blocks: the admin token has characters that cannot be sent",
        ),
        (
            &["blocks", "--admin-ca", "/nowhere.pem"],
            &admin,
            "cannot list the blocks: --admin-ca: cannot read /nowhere.pem: No such file",
        ),
    ] {
        let output = run(&mut tidegate(&[arguments, &["--admin", address]].concat()));
        let message = String::from_utf8(output.stderr).unwrap();
        let begins = format!("tidegate: {expected}");
        assert!(message.starts_with(&begins), "no {expected:?} in {message}");
        assert!(
            !message.contains("/v1/") && !message.contains("status 4"),
            "{message}"
        );
    }
}

/// A server with another version may not have the path that this version requests.
#[test]
fn a_server_of_another_version_is_recognized() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let other = std::thread::spawn(move || {
        use std::io::{Read as _, Write as _};
        let (mut stream, _) = listener.accept().unwrap();
        assert!(stream.read(&mut [0; 4_096]).unwrap() > 0);
        let body = r#"{"detail": "there is nothing at this path; the paths are /v1/rules and /v1/status"}"#;
        let head = format!(
            "HTTP/1.1 404 Not Found\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + body).as_bytes()).unwrap();
    });
    let output = run(&mut tidegate(&["blocks", "--admin", &address]));
    other.join().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let message = String::from_utf8(output.stderr).unwrap();
    let begins = format!(
        "tidegate: cannot list the blocks: the server at {address} does not support this command"
    );
    assert!(message.starts_with(&begins), "{message}");
}

#[test]
fn a_throttle_key_is_reset() {
    let server = Server::start(RULES);
    let body = json!({"key": "user:1", "limits": ["1/h"]});
    let ask = || {
        Ask::new("POST", server.http, "/v1/throttle")
            .body(&body)
            .send()
            .status
    };
    assert_eq!((ask(), ask()), (200, 429));
    let reset = printed(&server.operate(&["reset", "--throttle", "user:1"]));
    assert_eq!((reset.as_str(), ask()), ("reset user:1\n", 200));
    let nobody = server.operate(&["reset", "--throttle", "nobody"]);
    assert_eq!(nobody.status.code(), Some(1));
    assert_eq!(
        String::from_utf8_lossy(&nobody.stderr),
        "tidegate: no limit that was sent with a request has counters for this key in database 0\n"
    );
    assert_eq!(server.operate(&["reset"]).status.code(), Some(2));
}

/// Starts a server whose admin listener uses TLS, with the additional TLS settings `more`.
fn behind_tls(more: &str) -> Server {
    let scratch = Scratch::new();
    for name in ["ours", "other"] {
        authority(scratch.path(), name);
    }
    signed(scratch.path(), "ours", "server");
    signed(scratch.path(), "ours", "operator");
    signed(scratch.path(), "other", "stranger");
    let tls = format!("{{certificate: server.pem, key: server.key{more}}}");
    let admin = format!("{{address: '127.0.0.1:0', tls: {tls}}}");
    let others = "http: '127.0.0.1:0', grpc: '127.0.0.1:0', resp: '127.0.0.1:0'";
    let config = format!("listen: {{{others}, admin: {admin}}}\nadmin: {{token: secret}}\n");
    Server::start_in(scratch, &config)
}

/// Runs `tidegate status` with these arguments. Returns whether the command succeeded, and its
/// output.
fn status(server: &Server, args: &str) -> (bool, String) {
    let mut command = tidegate(&["status", "--token", "secret"]);
    command
        .env("TIDEGATE_ADMIN", server.admin.to_string())
        .args(args.split_whitespace())
        .current_dir(server.directory());
    let output = run(&mut command);
    let message = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&message).into_owned(),
    )
}

#[test]
fn the_admin_listener_speaks_tls() {
    let server = behind_tls("");
    let (is_reached, message) = status(&server, "--admin-ca ours.pem");
    assert!(is_reached, "{message}");
    let url = format!("https://{}/metrics", server.admin);
    let mut curl = std::process::Command::new(tool("curl"));
    curl.args(["-sS", "--cacert", "ours.pem", &url])
        .args(["-H", "authorization: Bearer secret"])
        .current_dir(server.directory());
    let metrics = String::from_utf8(run(&mut curl).stdout).unwrap();
    let loaded = "tidegate_last_certificate_load_success{listener=\"admin\"} 1\n";
    assert!(metrics.contains(loaded), "{metrics}");

    let in_the_clear = status(&server, "");
    let expected =
        "the listener at this address uses TLS; if this is the admin listener, pass the CA";
    assert!(
        !in_the_clear.0 && in_the_clear.1.contains(expected),
        "{in_the_clear:?}"
    );
    let contradiction = format!("--admin-ca ours.pem --admin http://{}", server.admin);
    let contradiction = status(&server, &contradiction);
    assert!(
        !contradiction.0 && contradiction.1.contains("write https://"),
        "{contradiction:?}"
    );
    let unknown = status(&server, "--admin-ca other.pem");
    assert!(
        !unknown.0 && unknown.1.contains("UnknownIssuer"),
        "{unknown:?}"
    );
    let nothing = status(&server, "--admin-ca server.key");
    let expected = "there is no certificate in server.key";
    assert!(!nothing.0 && nothing.1.contains(expected), "{nothing:?}");
    let unnamed = status(&server, &format!("--admin https://{}", server.admin));
    assert!(
        !unnamed.0 && unnamed.1.contains("--admin-ca"),
        "{unnamed:?}"
    );
    server.stop();
}

#[test]
fn a_listener_without_tls_is_recognized() {
    let server = Server::start(RULES);
    authority(server.directory(), "ours");
    let (is_reached, message) = status(&server, "--admin-ca ours.pem");
    let expected = "the listener at this address does not use TLS; remove --admin-ca";
    assert!(!is_reached && message.contains(expected), "{message}");
}

#[test]
fn a_client_ca_of_the_admin_listener_requires_a_certificate() {
    let server = behind_tls(", client_ca: ours.pem");
    let shown = |name: &str| {
        let files = format!("--admin-cert {name}.pem --admin-key {name}.key");
        status(&server, &format!("--admin-ca ours.pem {files}"))
    };
    let (is_reached, message) = shown("operator");
    assert!(is_reached, "{message}");
    let stranger = shown("stranger");
    let expected =
        "the listener rejected the client certificate; pass a valid certificate from the";
    assert!(!stranger.0 && stranger.1.contains(expected), "{stranger:?}");
    let none = status(&server, "--admin-ca ours.pem");
    let expected =
        "the listener requires a client certificate; pass a client certificate with --admin-cert";
    assert!(!none.0 && none.1.contains(expected), "{none:?}");
    server.stop();
}
