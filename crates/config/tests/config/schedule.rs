//! Tests of schedules in `when`, `allow` and `elastic`.

use tidegate::{Clock, Limiter, RateLimiter};
use tidegate_config::Config;
use tidegate_core::{
    Cost, Effect, MemoryBounds, MemoryStore, Request, Scratch, Span, Timestamp, Verdict,
};

/// Friday, June 19, 2026, 23:30, Berlin time.
const FRIDAY_NIGHT: Timestamp = Timestamp::from_micros(1_781_904_600_000_000);

const FILE: &str = "
rules:
  - name: nights
    when: {path: /report, time: 22:00-06:00, days: mon-fri, zone: Europe/Berlin}
    limits: [1/d]
    algorithm: fixed_window
  - name: zones
    when: {zone: {is: eu}}
    limits: [1/d]
";

fn mistakes(when: &str) -> Vec<String> {
    let file = format!("rules:\n  - name: r\n    limits: [1/s]\n    when: {when}\n");
    let mistakes = Config::parse(&file).unwrap_err();
    mistakes.iter().map(ToString::to_string).collect()
}

/// The limit is one request per night, for the nights that begin on Monday to Friday. All other
/// requests are not limited: requests during the day, on weekends, or for other paths.
#[test]
fn a_schedule_applies_on_every_listener() {
    let rules = Config::parse(FILE).unwrap().rules;
    let store = MemoryStore::new(MemoryBounds::default());
    let limiter = Limiter::new(rules, store, Clock::manual(FRIDAY_NIGHT));
    let asked = |path: &str| {
        let entries = [("path", path)];
        let request = Request::new(&entries, Cost::ONE).unwrap();
        let (rules, mut scratch) = (limiter.rules(), Scratch::default());
        let asked = |scratch: &mut Scratch, effect| {
            let verdict = limiter.check(&rules, scratch, &request, effect);
            let verdict: Verdict<'_> = verdict.ready().unwrap().unwrap();
            (verdict.allowed, verdict.rule.map(str::to_owned))
        };
        let peeked = asked(&mut scratch, Effect::Peek);
        assert_eq!(asked(&mut scratch, Effect::Charge), peeked);
        peeked
    };
    let nights = |allowed| (allowed, Some("nights".to_owned()));
    assert_eq!(
        [asked("/report"), asked("/report")],
        [nights(true), nights(false)]
    );
    assert_eq!(asked("/other"), (true, None));
    limiter
        .clock()
        .set(FRIDAY_NIGHT.after(Span::from_secs(6 * 3_600))); // Saturday 05:30
    assert_eq!(asked("/report").1, nights(true).1);
    limiter
        .clock()
        .set(FRIDAY_NIGHT.after(Span::from_secs(7 * 3_600)));
    assert_eq!(asked("/report"), (true, None));
    limiter
        .clock()
        .set(FRIDAY_NIGHT.after(Span::from_secs(24 * 3_600)));
    assert_eq!(asked("/report"), (true, None), "Saturday night");
}

#[test]
fn an_entry_may_have_the_name_of_a_schedule_field() {
    let rules = Config::parse(FILE).unwrap().rules;
    let applied = |entries| {
        let (request, mut scratch) = (
            Request::new(entries, Cost::ONE).unwrap(),
            Scratch::default(),
        );
        let charges = rules.charges(&request, FRIDAY_NIGHT, &mut scratch);
        charges.unwrap().len()
    };
    assert_eq!(
        (applied(&[("zone", "eu")]), applied(&[("zone", "us")])),
        (1, 0)
    );
}

#[test]
fn every_mistake_in_a_schedule_is_reported_with_its_line() {
    let field = "rules[0].when";
    let messages = mistakes("{time: [1-6, 06:00-06:00], days: [monday], zone: Mars}");
    let times = "expected two 24-hour times such as 22:00-06:00, got \"1-6\"; write 01:00-06:00";
    let days = "expected one of mon, tue, wed, thu, fri, sat, sun, or a range such as mon-fri, got \"monday\"; write mon";
    let expected = [
        format!("{field}.time[0] (line 4): {times}"),
        format!(
            "{field}.time[1] (line 4): begins and ends at the same time; remove `time` for the whole day"
        ),
        format!("{field}.days[0] (line 4): {days}"),
        format!(
            "{field}.zone (line 4): \"Mars\" is not an IANA time zone such as UTC or Europe/Berlin"
        ),
    ];
    assert_eq!(messages, expected);
    let messages = mistakes("{time: [], days: , zone: [UTC]}");
    let expected = [
        format!("{field}.time (line 4): is empty; write a value such as 22:00-06:00, or remove it"),
        format!("{field}.days (line 4): is empty; write a value such as mon, or remove it"),
        format!("{field}.zone (line 4): expected a time zone such as Europe/Berlin, got a list"),
    ];
    assert_eq!(messages, expected);
    let messages = mistakes("{zone: eu}");
    let advice = "requires `time` or `days`; to match an entry of this name, write {is: …}";
    assert_eq!(messages, [format!("{field}.zone (line 4): {advice}")]);
    let many = vec!["01:00-02:00"; 17].join(", ");
    let messages = mistakes(&format!("{{time: [{many}]}}"));
    assert_eq!(
        messages,
        [format!(
            "{field}.time (line 4): 17 times exceed the maximum of 16"
        )]
    );
}

#[test]
fn unsupported_schedule_fields_are_rejected() {
    for name in ["until", "since", "hours", "weekdays", "timezone"] {
        let file =
            |value: &str| format!("rules: [{{name: r, limits: [1/s], when: {{{name}: {value}}}}}]");
        let messages = crate::mistakes(&file("'2026-12-31'"));
        assert_eq!(messages.len(), 1, "{messages:?}");
        assert!(
            messages[0].contains("which has only `time`, `days` and `zone`"),
            "{messages:?}"
        );
        assert!(Config::parse(&file("{is: x}")).is_ok(), "{name}");
    }
}
