//! Tests of the status document.

use crate::listener::TestListener;

#[test]
fn status_has_version_readiness_store_rules_and_listeners() {
    let listener = TestListener::open();
    assert!(listener.spend());
    listener.at_secs(90);
    let status = listener.ask("GET", "/v1/status", "").json();
    assert_eq!(status["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(status["started"], "2023-11-14T22:13:00Z");
    assert_eq!(
        (&status["uptime_ms"], &status["state"]),
        (&90_000.into(), &"ready".into())
    );
    assert_eq!(status["rules"], 2);
    assert_eq!(
        status["rules_file"],
        listener.file.path().display().to_string()
    );
    assert_eq!(status["store"]["kind"], "memory");
    assert_eq!(status["store"]["keys_in_process"], 2);
    assert_eq!(status["store"]["persistent"], false);
    let listed = &status["listeners"][0];
    assert_eq!(listed["name"], "admin");
    assert_eq!(
        listed["address"],
        listener.listener.local_addr().to_string()
    );
    assert_eq!(listener.ask("POST", "/v1/status", "").status, 405);
}
