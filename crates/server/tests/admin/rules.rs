//! Tests of the rule list, and of reloads.

use serde_json::json;

use crate::listener::TestListener;

#[test]
fn rules_are_listed_in_their_own_notation() {
    let listener = TestListener::open();
    let rules = listener.ask("GET", "/v1/rules", "").json();
    let first = &rules["rules"][0];
    assert_eq!(first["name"], "r");
    assert_eq!(first["when"], "{path: /**}");
    assert_eq!(first["key"], json!(["path", "ip"]));
    assert_eq!(first["mode"], "enforce");
    assert!(first["limits"][0].as_str().unwrap().starts_with("2/min"));
    let second = &rules["rules"][1];
    assert_eq!(
        (&second["when"], &second["key"], &second["mode"]),
        (&json!("{}"), &json!([]), &json!("shadow"))
    );
}

#[test]
fn a_reload_is_all_or_nothing() {
    let listener = TestListener::open();
    std::fs::write(listener.file.path(), "rules: [{name: s, limits: [1/s]}]").unwrap();
    let reloaded = listener.ask("POST", "/v1/reload", "");
    assert_eq!(
        (reloaded.status, reloaded.json()),
        (200, json!({"rules": 1}))
    );
    assert!(listener.limiter.rules().rule("s").is_some());
    let ready = listener.ask("GET", "/readyz", "").json();
    assert_eq!(
        ready,
        json!({"ready": true, "state": "ready", "degraded": [], "last_reload": "ok", "mistakes": []})
    );

    std::fs::write(listener.file.path(), "rules: [{nam: s}]").unwrap();
    let refused = listener.ask("POST", "/v1/reload", "");
    assert_eq!(refused.status, 422);
    assert!(refused.problem().contains("the old rules stay active"));
    let mistakes = refused.json()["mistakes"].clone();
    assert!(mistakes[0].as_str().unwrap().contains("nam"), "{mistakes}");
    assert!(
        listener.limiter.rules().rule("s").is_some(),
        "the old rules stay active"
    );
    let ready = listener.ask("GET", "/readyz", "");
    assert_eq!((ready.status, &ready.json()["mistakes"]), (200, &mistakes));
    assert_eq!(ready.json()["state"], "degraded");
    let degraded = json!(["the last reload failed; the old rules stay active"]);
    assert_eq!(ready.json()["degraded"], degraded);
    let metrics = listener.ask("GET", "/metrics", "").body;
    for line in [
        "tidegate_reloads_total{result=\"ok\"} 1",
        "tidegate_reloads_total{result=\"failed\"} 1",
        "tidegate_last_reload_success 0",
    ] {
        assert!(
            metrics.lines().any(|found| found == line),
            "{line}: {metrics}"
        );
    }
}

/// The server reads some settings only at startup. The response must list changed settings of this
/// kind, so that the operator notices that they have not been applied.
#[test]
fn a_reload_names_the_settings_that_need_a_restart() {
    let listener = TestListener::open();
    let rules = "rules: [{name: s, limits: [1/s]}]\n";
    let changed = "listen: {http: 127.0.0.1:9999}\nstore: {memory: {max_keys: 77}}\n";
    std::fs::write(listener.file.path(), format!("{rules}{changed}")).unwrap();
    // A second reload of the same file reports the same settings.
    for _ in 0..2 {
        let reloaded = listener.ask("POST", "/v1/reload", "");
        let expected = json!({"rules": 1, "restart_required": ["listen", "store"]});
        assert_eq!((reloaded.status, reloaded.json()), (200, expected));
        let status = listener.ask("GET", "/v1/status", "").json();
        assert_eq!(status["restart_required"], json!(["listen", "store"]));
    }
    std::fs::write(listener.file.path(), rules).unwrap();
    let reloaded = listener.ask("POST", "/v1/reload", "").json();
    assert_eq!(reloaded, json!({"rules": 1}));
}
