//! Tests of the commands that real clients send when they connect, return connections to a pool, or
//! query information about the server.

use crate::{listener::TestListener, value::Value};

#[track_caller]
fn assert_answers(listener: &TestListener, asked: &[(&str, &str)]) {
    let mut client = listener.connect();
    for (command, expected) in asked {
        assert_eq!(client.command(command).to_string(), *expected, "{command}");
    }
}

#[test]
fn ping_echo_select_quit_reset() {
    let listener = TestListener::open();
    assert_answers(
        &listener,
        &[
            ("PING", "+PONG"),
            ("ping hello", r#""hello""#),
            (
                "PING a b",
                "-ERR wrong number of arguments for 'ping' command",
            ),
            ("ECHO x", r#""x""#),
            ("ECHO", "-ERR wrong number of arguments for 'echo' command"),
            ("SELECT 0", "+OK"),
            ("SELECT 1", "+OK"),
            ("SELECT 16", "-ERR DB index is out of range"),
            ("SELECT -1", "-ERR DB index is out of range"),
            ("SELECT x", "-ERR value is not an integer or out of range"),
            ("READONLY", "+OK"),
            ("CLIENT SETNAME me", "+OK"),
            ("RESET", "+RESET"),
            ("CLIENT GETNAME", "nil"),
            ("DBSIZE", "0"),
        ],
    );
    assert_eq!(
        listener.converse(b"PING\r\nQUIT\r\nPING\r\n"),
        "+PONG\r\n+OK\r\n"
    );
}

#[test]
fn hello_negotiates_the_protocol() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    let two = client.command("HELLO");
    assert!(matches!(two, Value::Array(_)), "RESP2 has no maps: {two}");
    assert_eq!(two.at("proto").to_string(), "2");
    let three = client.command("HELLO 3 AUTH default whatever SETNAME me");
    assert!(matches!(three, Value::Map(_)), "{three}");
    assert_eq!(three.at("server").to_string(), r#""redis""#);
    assert_eq!(three.at("proto").to_string(), "3");
    assert_eq!(three.at("mode").to_string(), r#""standalone""#);
    assert_eq!(three.at("role").to_string(), r#""master""#);
    assert_eq!(three.at("modules").to_string(), "[]");
    assert_eq!(three.at("id"), two.at("id"));
    assert_eq!(client.command("CLIENT GETNAME").to_string(), r#""me""#);
    assert!(matches!(client.command("INFO"), Value::Verbatim(_)));
    assert!(matches!(client.command("CONFIG GET save"), Value::Map(pairs) if pairs.is_empty()));
    assert!(matches!(client.command("HELLO 2"), Value::Array(_)));
}

#[test]
fn a_rejected_hello_changes_nothing() {
    let listener = TestListener::open();
    assert_answers(
        &listener,
        &[
            ("HELLO 4", "-NOPROTO unsupported protocol version"),
            (
                "HELLO x",
                "-ERR Protocol version is not an integer or out of range",
            ),
            (
                "HELLO 3 AUTH default",
                "-ERR Syntax error in HELLO option 'AUTH'",
            ),
            (
                "HELLO 3 NONSENSE",
                "-ERR Syntax error in HELLO option 'NONSENSE'",
            ),
            (
                "HELLO 3 SETNAME me AUTH root x",
                "-WRONGPASS invalid username-password pair or user is disabled.",
            ),
            ("CLIENT GETNAME", "nil"),
        ],
    );
    let refused = listener.converse(b"HELLO 3 SETNAME \"a b\"\r\nCLIENT GETNAME\r\n");
    assert!(
        refused
            .starts_with("-ERR Client names cannot contain spaces, newlines or special characters")
    );
    assert!(refused.ends_with("$-1\r\n"), "RESP2 still: {refused}");
}

#[test]
fn auth_is_answered_like_redis_without_a_password() {
    assert_answers(
        &TestListener::open(),
        &[
            (
                "AUTH secret",
                "-ERR AUTH <password> called without any password configured for the default user. \
             Are you sure your configuration is correct?",
            ),
            ("AUTH default secret", "+OK"),
            (
                "AUTH root secret",
                "-WRONGPASS invalid username-password pair or user is disabled.",
            ),
            (
                "AUTH a b c",
                "-ERR wrong number of arguments for 'auth' command",
            ),
        ],
    );
}

#[test]
fn client_sets_and_returns_connection_properties() {
    let listener = TestListener::open();
    assert_answers(
        &listener,
        &[
            ("CLIENT SETINFO LIB-NAME redis-py", "+OK"),
            ("CLIENT SETINFO lib-ver 7.0.1", "+OK"),
            (
                "CLIENT SETINFO LIB-COLOUR red",
                "-ERR Unrecognized option 'LIB-COLOUR'",
            ),
            ("CLIENT SETNAME pool-1", "+OK"),
            ("CLIENT GETNAME", r#""pool-1""#),
            ("CLIENT NO-EVICT on", "+OK"),
            ("CLIENT NO-TOUCH OFF", "+OK"),
            (
                "CLIENT NO-TOUCH perhaps",
                "-ERR syntax error: expected ON or OFF",
            ),
            (
                "CLIENT SETNAME",
                "-ERR wrong number of arguments for 'client|setname' command",
            ),
            (
                "CLIENT MAINT_NOTIFICATIONS ON",
                "-ERR unknown subcommand 'maint_notifications' of 'client'",
            ),
            (
                "CLIENT",
                "-ERR wrong number of arguments for 'client' command",
            ),
        ],
    );
    let mut client = listener.connect();
    client.command("CLIENT SETNAME me");
    client.command("CLIENT SETINFO LIB-NAME lib");
    let id = client.command("CLIENT ID").to_string();
    for describes in ["CLIENT INFO", "CLIENT LIST"] {
        let Value::Bulk(line) = client.command(describes) else {
            panic!("{describes} is text")
        };
        for part in [
            format!("id={id} addr=127.0.0.1:"),
            " name=me ".into(),
            " resp=2 lib-name=lib ".into(),
        ] {
            assert!(line.contains(&part), "{line}");
        }
    }
    let tracking = client.command("CLIENT TRACKING ON").to_string();
    assert!(
        tracking.starts_with("-ERR client tracking is not supported"),
        "{tracking}"
    );
    assert_ne!(listener.connect().command("CLIENT ID").to_string(), id);
}

#[test]
fn client_reply_suppresses_replies() {
    let listener = TestListener::open();
    assert_eq!(
        listener.converse(b"CLIENT REPLY SKIP\r\nPING 1\r\nPING 2\r\n"),
        "$1\r\n2\r\n"
    );
    assert_eq!(
        listener.converse(b"CLIENT REPLY OFF\r\nPING 1\r\nNOPE\r\nCLIENT REPLY SKIP\r\nCLIENT REPLY ON\r\nPING 2\r\n"),
        "+OK\r\n$1\r\n2\r\n"
    );
    assert_eq!(
        listener.converse(b"CLIENT REPLY MAYBE\r\n"),
        "-ERR syntax error: expected ON, OFF or SKIP\r\n"
    );
}

#[test]
fn info_and_config_satisfy_clients() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    let Value::Bulk(info) = client.command("INFO server") else {
        panic!("INFO is text")
    };
    for line in [
        "redis_version:7.",
        "redis_mode:standalone",
        "loading:0",
        "role:master",
        "cluster_enabled:0",
    ] {
        assert!(
            info.lines().any(|have| have.starts_with(line)),
            "no {line} in {info}"
        );
    }
    assert_eq!(client.command("CONFIG GET save").to_string(), "[]");
    assert!(
        client
            .command("CONFIG SET save x")
            .to_string()
            .starts_with("-ERR ")
    );
    assert_eq!(
        client.command("CONFIG REWRITE").to_string(),
        "-ERR unknown subcommand 'REWRITE' of 'config'"
    );
}

#[test]
fn commands_are_described() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    let all = client.command("COMMAND");
    assert_eq!(
        client.command("COMMAND COUNT").to_string(),
        all.items().len().to_string()
    );
    assert_eq!(
        client.command("COMMAND LIST").items().len(),
        all.items().len()
    );
    assert_eq!(
        client
            .command("COMMAND INFO cl.throttle ping nope")
            .to_string(),
        r#"[["cl.throttle", -5, [+write, +fast], 1, 1, 1, [+@module], [], "#.to_owned()
            + r#"[["flags", [+RW, +access, +update], "begin_search", ["type", "index", "spec", ["index", 1]], "#
            + r#""find_keys", ["type", "range", "spec", ["lastkey", 0, "keystep", 1, "limit", 0]]]], []], "#
            + r#"["ping", -1, [+fast], 0, 0, 0, [+@connection], [], [], []], nil]"#
    );
    let docs = client.command("COMMAND DOCS THROTTLE nope");
    assert_eq!(docs.items().len(), 2, "one pair: {docs}");
    assert_eq!(docs.at("throttle").at("since").to_string(), r#""0.1.0""#);
    assert_eq!(
        client.command("COMMAND DOCS").items().len(),
        2 * all.items().len()
    );
    assert_eq!(
        client
            .command("COMMAND GETKEYS CL.THROTTLE k 1 1 1")
            .to_string(),
        r#"["k"]"#
    );
    assert_eq!(
        client.command("COMMAND GETKEYS PING x").to_string(),
        "-ERR The command has no key arguments"
    );

    client.command("HELLO 3");
    let docs = client.command("COMMAND DOCS");
    assert!(
        matches!(&docs, Value::Map(pairs) if pairs.len() == all.items().len()),
        "{docs}"
    );
    assert!(matches!(
        client.command("COMMAND INFO throttle").items()[0].items()[2],
        Value::Set(_)
    ));
}

#[test]
fn an_unknown_command_is_named_on_one_line() {
    let listener = TestListener::open();
    assert_answers(
        &listener,
        &[
            (
                "FOO",
                "-ERR unknown command 'FOO', with args beginning with: ",
            ),
            (
                "GET a b",
                "-ERR unknown command 'GET', with args beginning with: 'a' 'b' ",
            ),
        ],
    );
    let mut client = listener.connect();
    let forged = client.command_of(&[b"X\r\n+OK", b"\n"]).to_string();
    assert_eq!(
        forged,
        "-ERR unknown command 'X  +OK', with args beginning with: ' ' "
    );
    let long = client
        .command_of(&[&[b'x'; 60_000], &[b'y'; 60_000], b"z"])
        .to_string();
    assert!(long.len() < 400, "{} bytes", long.len());
    assert_eq!(client.command("PING").to_string(), "+PONG");
}
