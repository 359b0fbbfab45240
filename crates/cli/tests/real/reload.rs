//! Tests hot reload of rules: counters keep their values, and an invalid file is reported but
//! changes nothing.

use std::{fs, os::unix::fs::symlink};

use serde_json::{Value, json};

use crate::support::{Ask, EVERY_LISTENER, Scratch, Server};

fn rules(limit: u32) -> String {
    format!("rules: [{{name: api, key: [user], limits: [{limit}/h], algorithm: fixed_window}}]\n")
}

/// Replaces the server's rules file in the same way as an editor: writes a new file and renames it.
fn rewrite(server: &Server, rules: &str) {
    let draft = server.directory().join("draft");
    fs::write(&draft, format!("{EVERY_LISTENER}{rules}")).unwrap();
    fs::rename(draft, server.rules_file()).unwrap();
}

fn remaining(server: &Server) -> Value {
    server.check(&json!({"user": "u1"})).json()["remaining"].clone()
}

#[test]
fn a_changed_file_takes_effect_and_counts_are_kept() {
    let mut server = Server::start(&rules(5));
    assert_eq!(remaining(&server), 4);
    assert_eq!(remaining(&server), 3);
    rewrite(&server, &rules(8));
    server.wait_for(&["reloaded the rules"]);
    assert_eq!(remaining(&server), 5, "2 were spent of 5, and now 3 of 8");
}

/// Kubernetes changes a `ConfigMap`'s files in a container by replacing the symbolic link to their
/// folder.
#[test]
fn a_file_behind_a_replaced_link_takes_effect() {
    let scratch = Scratch::new();
    for folder in ["..1", "..2"] {
        fs::create_dir(scratch.join(folder)).unwrap();
    }
    symlink("..1", scratch.join("..data")).unwrap();
    symlink("..data/rules.yaml", scratch.join("rules.yaml")).unwrap();
    let mut server = Server::start_in(scratch, &format!("{EVERY_LISTENER}{}", rules(5)));
    assert_eq!(remaining(&server), 4);
    let changed = server.directory().join("..2/rules.yaml");
    fs::write(changed, format!("{EVERY_LISTENER}{}", rules(8))).unwrap();
    let link = server.directory().join("..data_tmp");
    symlink("..2", &link).unwrap();
    fs::rename(link, server.directory().join("..data")).unwrap();
    server.wait_for(&["reloaded the rules"]);
    assert_eq!(remaining(&server), 6, "1 was spent of 5, and now 2 of 8");
}

#[test]
fn sighup_reloads() {
    let mut server = Server::start(&rules(5));
    assert_eq!(remaining(&server), 4);
    server.signal("HUP");
    server.wait_for(&["reloaded the rules"]);
    assert_eq!(remaining(&server), 3);
    assert!(
        server
            .metrics()
            .contains("tidegate_reloads_total{result=\"ok\"} 1\n")
    );
}

#[test]
fn the_admin_listener_reloads() {
    let server = Server::start(&rules(5));
    remaining(&server);
    rewrite(&server, &rules(7));
    let answer = Ask::new("POST", server.admin, "/v1/reload").send();
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(remaining(&server), 5, "1 was spent of 5, and now 2 of 7");
}

#[test]
fn every_reload_reports_the_warnings_for_the_new_file() {
    let mut server = Server::start(&rules(5));
    let rule = "rules: [{name: api, when: {path: /login}, limits: [5/h]}]\n";
    rewrite(&server, rule);
    let warning = "exact-path: /login/, /LOGIN, ";
    let logged = ["WARN", "rules[0].when.path", warning];
    server.wait_for(&logged);
    server.wait_for(&["reloaded the rules", "warnings=1"]);

    server.signal("HUP");
    server.wait_for(&logged);
    server.wait_for(&["reloaded the rules", "warnings=1"]);

    let answer = Ask::new("POST", server.admin, "/v1/reload").send();
    let warnings = &answer.json()["warnings"];
    assert_eq!(
        warnings.as_array().map(Vec::len),
        Some(1),
        "{}",
        answer.body
    );
    let text = warnings[0].as_str().unwrap();
    assert!(text.starts_with("rules[0].when.path (line "), "{text}");
    assert!(text.contains(warning), "{text}");

    let output = server.operate(&["reload"]);
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(printed, format!("reloaded: 1 rules\nwarning: {text}\n"));

    rewrite(&server, &rules(5));
    server.wait_for(&["reloaded the rules", "warnings=0"]);
    let answer = Ask::new("POST", server.admin, "/v1/reload").send();
    assert_eq!(answer.json(), json!({"rules": 1}));
}

/// After a rule is renamed, the blocks under its former name are no longer enforced. Without the
/// log record, an operator would not notice that the blocks have no effect.
#[test]
fn a_reload_that_renames_a_rule_logs_its_blocks() {
    let mut server = Server::start(&rules(5));
    let blocked = server.operate(&["block", "api", "u1"]);
    assert!(blocked.status.success(), "{blocked:?}");
    rewrite(&server, &rules(5).replace("name: api", "name: public"));
    let message = server.wait_for(&["WARN", "1 block is inactive"]);
    let named = "because its rule no longer exists or has another key: \"api\"; ";
    assert!(message.contains(named), "{message}");
}

/// Some programs truncate a file before they write its new content. The server may read the file in
/// between.
#[test]
fn an_empty_file_removes_no_limits() {
    let mut server = Server::start(&rules(5));
    assert_eq!(remaining(&server), 4);
    for (number, nothing) in (1..).zip(["\n", "# our limits\n", "---\n\n# our limits\n", "null\n"])
    {
        fs::write(server.rules_file(), nothing).unwrap();
        server.wait_for(&["kept the old rules"]);
        assert_eq!(remaining(&server), 4 - number, "{nothing:?}");
    }
}

/// A file that is cut off before its section `rules` may still be valid, but then has no rules.
#[test]
fn removing_all_rules_is_logged() {
    let mut server = Server::start(&rules(5));
    rewrite(&server, "");
    server.wait_for(&["the file no longer has rules", "rules_before=1"]);
}

/// The errors must be on one line, because log collectors treat every line as a separate record.
#[test]
fn a_file_with_several_mistakes_is_one_log_record() {
    let mut server = Server::start(&rules(5));
    rewrite(
        &server,
        "rules: [{nam: api, limits: [1/s]}, {name: b, limits: [oops]}]\n",
    );
    let line = server.wait_for(&["kept the old rules"]);
    for part in ["mistakes=", "unknown key `nam`", "oops", "; "] {
        assert!(line.contains(part), "no {part:?} in {line}");
    }
}

#[test]
fn an_invalid_file_changes_nothing_and_is_reported_everywhere() {
    let mut server = Server::start(&rules(5));
    assert_eq!(remaining(&server), 4);
    rewrite(&server, "rules: [{name: api, limits: [oops]}]\n");
    server.wait_for(&["kept the old rules"]);
    assert_eq!(remaining(&server), 3, "the old rules decide on");

    let metrics = server.metrics();
    assert!(
        metrics.contains("tidegate_reloads_total{result=\"failed\"} 1\n"),
        "{metrics}"
    );
    assert!(
        metrics.contains("tidegate_last_reload_success 0\n"),
        "{metrics}"
    );
    let seen = Ask::get(server.admin, "/readyz").send();
    assert!(seen.body.contains("rules[0].limits[0]"), "{}", seen.body);
    let asked = Ask::new("POST", server.admin, "/v1/reload").send();
    assert!((400..500).contains(&asked.status), "{}", asked.status);
    assert!(asked.body.contains("rules[0].limits[0]"), "{}", asked.body);

    rewrite(&server, &rules(6));
    server.wait_for(&["reloaded the rules"]);
    assert_eq!(remaining(&server), 3, "2 were spent of 5, and now 3 of 6");
    assert!(
        server
            .metrics()
            .contains("tidegate_last_reload_success 1\n")
    );
}

/// A read that failed because of exhausted file descriptors is retried until it succeeds, without
/// any change to the file.
#[test]
fn an_unreadable_file_is_retried_until_it_is_readable() {
    let mut server = Server::start(&rules(5));
    assert_eq!(remaining(&server), 4);
    server.limit_files(3);
    rewrite(&server, &rules(9));
    server.wait_for(&[
        "kept the old rules: cannot read rules.yaml",
        "retrying until the file can be read",
    ]);
    server.limit_files(1_024);
    let line = server.wait_for(&[" the "]);
    assert!(
        line.contains("reloaded the rules"),
        "the failure is logged once: {line}"
    );
    assert_eq!(remaining(&server), 7, "1 was spent of 5, and now 2 of 9");
    let metrics = server.metrics();
    for sample in [
        "tidegate_reloads_total{result=\"ok\"} 1\n",
        "tidegate_reloads_total{result=\"failed\"} 1\n",
    ] {
        assert!(metrics.contains(sample), "no {sample:?} in:\n{metrics}");
    }
}

#[test]
fn adding_or_removing_a_rule_does_not_affect_the_others() {
    let mut server = Server::start(&rules(5));
    assert_eq!(remaining(&server), 4);
    let two = "rules: [{name: new, limits: [100/h]}, {name: api, key: [user], limits: [5/h], algorithm: fixed_window}]\n";
    rewrite(&server, two);
    server.wait_for(&["reloaded the rules"]);
    assert_eq!(remaining(&server), 3);
}
