//! Tests of the section `shutdown` in the rules file.

use std::time::Duration;

use tidegate_config::{Config, ShutdownConfig};

fn read(text: &str) -> ShutdownConfig {
    Config::parse(text).unwrap().shutdown
}

#[test]
fn the_default_is_no_delay_ten_seconds_to_drain_and_a_second_for_a_handover() {
    for text in [
        "",
        "shutdown: {}",
        "shutdown: {pre_stop_delay: off}",
        "shutdown: {drain: 10s}",
    ] {
        let shutdown = read(text);
        assert_eq!(shutdown.pre_stop_delay, Duration::ZERO, "{text}");
        assert_eq!(shutdown.drain, Duration::from_secs(10), "{text}");
        assert_eq!(shutdown.handover, Duration::from_secs(1), "{text}");
    }
}

#[test]
fn times_are_read_and_bounded() {
    let shutdown = read("shutdown: {pre_stop_delay: 5s, drain: 1h, handover: 5ms}");
    assert_eq!(shutdown.pre_stop_delay, Duration::from_secs(5));
    assert_eq!(shutdown.drain, Duration::from_secs(3_600));
    assert_eq!(shutdown.handover, Duration::from_millis(5));
    let mistakes =
        Config::parse("shutdown: {pre_stop_delay: soon, drain: 61min, drane: 1s, handover: 61s}")
            .unwrap_err();
    let mistakes: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
    let expected = [
        "shutdown.drane (line 1): unknown key `drane`; expected one of pre_stop_delay, drain, handover",
        "shutdown.pre_stop_delay (line 1): expected a duration",
        "shutdown.drain (line 1): must be 1ms to 1h",
        "shutdown.handover (line 1): must be 1ms to 1min",
    ];
    for (mistake, expected) in mistakes.iter().zip(expected) {
        assert!(mistake.starts_with(expected), "{mistakes:?}");
    }
    assert_eq!(mistakes.len(), 4, "{mistakes:?}");
}
