//! Tests that schedules follow local time, including changes to and from daylight saving time.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use jiff::{
    civil::{Date, Weekday},
    tz::TimeZone,
};
use proptest::prelude::*;
use tidegate_core::{
    ActiveHours, AlgorithmName, Cost, Days, Headroom, Hours, LimitSpec, Request, Rule, RuleSet,
    Scratch, Timestamp, When, bounds, notation,
};

fn schedule(hours: &[&str], days: &str, zone: &str) -> ActiveHours {
    let hours = hours.iter().map(|text| Hours::parse(text).unwrap());
    ActiveHours::new(hours.collect(), Days::parse(days).unwrap(), zone).unwrap()
}

/// Parses an instant such as `2026-03-29T01:30:00Z`.
fn at(text: &str) -> Timestamp {
    let instant: jiff::Timestamp = text.parse().unwrap();
    Timestamp::from_micros(instant.as_microsecond().try_into().unwrap())
}

/// Returns a string with one character for each of `quarters` quarter hours, starting at `first`:
/// `#` if the schedule holds, and `.` otherwise.
fn drawn(schedule: &ActiveHours, first: &str, quarters: u64) -> String {
    let instant = |quarter| at(first).as_micros() + quarter * 15 * 60 * 1_000_000;
    let holds = |quarter| schedule.holds(Timestamp::from_micros(instant(quarter)));
    let mark = |quarter| if holds(quarter) { '#' } else { '.' };
    (0..quarters).map(mark).collect()
}

#[test]
fn hours_begin_with_their_first_minute_and_end_before_their_last() {
    let early = schedule(&["01:00-06:00"], "mon-sun", "Europe/Berlin");
    for (instant, holds) in [
        ("2026-06-15T00:59:59.999999+02:00", false),
        ("2026-06-15T01:00:00+02:00", true),
        ("2026-06-15T05:59:59.999999+02:00", true),
        ("2026-06-15T06:00:00+02:00", false),
        ("2026-12-15T00:59:59+01:00", false),
        ("2026-12-15T01:00:00+01:00", true),
    ] {
        assert_eq!(early.holds(at(instant)), holds, "{instant}");
    }
    let whole = schedule(&["00:00-24:00"], "mon-sun", "UTC");
    assert!(whole.holds(at("2026-06-15T00:00:00Z")) && whole.holds(at("2026-06-15T23:59:59Z")));
    let several = schedule(&["01:00-02:00", "22:00-22:30"], "mon-sun", "UTC");
    assert_eq!(
        drawn(&several, "2026-06-15T21:30:00Z", 24),
        "..##..........####......"
    );
}

/// A range that includes midnight belongs to the day on which it starts. June 19, 2026, is a
/// Friday.
#[test]
fn a_night_belongs_to_the_day_on_which_it_starts() {
    let friday = schedule(&["22:00-06:00"], "fri", "UTC");
    for (instant, holds) in [
        ("2026-06-19T05:59:59Z", false),
        ("2026-06-19T21:59:59Z", false),
        ("2026-06-19T22:00:00Z", true),
        ("2026-06-20T05:59:59Z", true),
        ("2026-06-20T06:00:00Z", false),
        ("2026-06-20T22:00:00Z", false),
    ] {
        assert_eq!(friday.holds(at(instant)), holds, "{instant}");
    }
    let sunday = schedule(&["22:00-06:00"], "sun", "UTC");
    assert!(sunday.holds(at("2026-06-22T05:00:00Z")), "Monday morning");
    let weekend = schedule(&[], "sat-sun", "Pacific/Auckland");
    assert!(weekend.holds(at("2026-06-19T12:00:00Z")), "Saturday there");
    assert!(!weekend.holds(at("2026-06-21T12:00:00Z")), "Monday there");
}

/// In Berlin, the hour from 02:00 to 03:00 does not exist on March 29, 2026, and occurs twice on
/// October 25, 2026.
#[test]
fn a_skipped_hour_never_occurs_and_a_repeated_hour_occurs_twice() {
    let skipped = |hours| {
        let schedule = schedule(&[hours], "mon-sun", "Europe/Berlin");
        drawn(&schedule, "2026-03-29T00:00:00Z", 12) // starts at 01:00 local time; the fifth quarter is 03:00
    };
    assert_eq!(skipped("02:00-03:00"), "............");
    assert_eq!(skipped("01:30-02:30"), "..##........");
    assert_eq!(skipped("02:30-04:00"), "....####....");

    let repeated = |hours| {
        let schedule = schedule(&[hours], "mon-sun", "Europe/Berlin");
        drawn(&schedule, "2026-10-24T23:00:00Z", 16) // starts at 01:00 local time; 02:00 is the fifth quarter and the ninth
    };
    assert_eq!(repeated("02:00-03:00"), "....########....");
    assert_eq!(repeated("01:30-02:30"), "..####..##......");
    assert_eq!(repeated("02:30-03:30"), "......##..####..");
}

#[test]
fn an_invalid_schedule_is_refused_with_advice() {
    let hours = |text| Hours::parse(text).unwrap_err().to_string();
    for text in [
        "",
        "01:00",
        "01:00-",
        "24:00-01:00",
        "01:60-02:00",
        "01:00-24:01",
        "+1:00-02:00",
        "01:00-02:00-03:00",
        "é1:00-02:00",
    ] {
        let expected = format!("expected two 24-hour times such as 22:00-06:00, got {text:?}");
        assert_eq!(hours(text), expected);
    }
    for text in ["1-6", "1:00-6:00"] {
        let message = hours(text);
        assert!(message.ends_with("; write 01:00-06:00"), "{message}");
    }
    assert!(hours("06:00-06:00").starts_with("begins and ends at the same time"));
    for text in ["", "monday", "Mon", "mon-", "mon-tue-wed", "1"] {
        let message = Days::parse(text).unwrap_err().to_string();
        assert!(message.starts_with("expected one of mon, tue"), "{message}");
    }
    let zone = ActiveHours::new(Vec::new(), Days::ALL, "Europe/Berlln").unwrap_err();
    assert_eq!(zone.field, "zone");
    let many = vec![Hours::parse("01:00-02:00").unwrap(); bounds::MAX_HOURS + 1];
    assert_eq!(
        ActiveHours::new(many, Days::ALL, "UTC").unwrap_err().field,
        "time"
    );
}

#[test]
fn rules_allow_lists_and_elastic_limits_follow_schedules() {
    let rate = notation::rate("10/s").unwrap();
    let limit = LimitSpec::shorthand(rate, AlgorithmName::TokenBucket).build();
    let limits = vec![limit.unwrap()];
    let nights = || When::default().during(schedule(&["22:00-06:00"], "mon-sun", "UTC"));
    let rule = |name| Rule::new(name, limits.clone()).unwrap();
    let rules = vec![
        rule("always"),
        rule("nights").when(nights()),
        rule("days").allowing(vec![nights()]),
        rule("stretches")
            .elastic(50, Headroom::When(nights()))
            .unwrap(),
    ];
    let rules = RuleSet::build(rules, Vec::new()).unwrap();
    let charged = |instant| {
        let (request, mut scratch) = (Request::new(&[], Cost::ONE).unwrap(), Scratch::default());
        let charges = rules.charges(&request, at(instant), &mut scratch).unwrap();
        let name = |limits: &tidegate_core::Limits| limits.name().unwrap().to_owned();
        let names: Vec<String> = charges.iter().map(|charge| name(charge.limits)).collect();
        let stretches = charges.last().unwrap().limits;
        let stretch = rules.rule("stretches").unwrap().limits().stretched();
        (
            names,
            stretch.is_some_and(|stretched| std::ptr::eq(stretched, stretches)),
        )
    };
    let names = |names: [&str; 3]| names.map(String::from).to_vec();
    let noon = (names(["always", "days", "stretches"]), false);
    assert_eq!(charged("2026-06-15T12:00:00Z"), noon);
    let midnight = (names(["always", "nights", "stretches"]), true);
    assert_eq!(charged("2026-06-15T00:00:00Z"), midnight);
    let everything = RuleSet::build(vec![rule("all")], vec![nights()]).unwrap();
    let (request, mut scratch) = (Request::new(&[], Cost::ONE).unwrap(), Scratch::default());
    let midnight = everything.charges(&request, at("2026-06-15T00:00:00Z"), &mut scratch);
    assert!(midnight.unwrap().is_empty());
}

const ZONES: [&str; 6] = [
    "UTC",
    "Europe/Berlin",
    "America/Havana",      // changes its clocks at midnight
    "Australia/Lord_Howe", // shifts by half an hour
    "Asia/Kathmandu",
    "Africa/Casablanca", // shifts back during Ramadan
];

fn name(day: Weekday) -> &'static str {
    let at = usize::try_from(day.to_monday_zero_offset()).unwrap();
    ["mon", "tue", "wed", "thu", "fri", "sat", "sun"][at]
}

proptest! {
    /// A schedule gives the same result as a reference implementation that compares formatted local
    /// times and days.
    #[test]
    fn the_schedule_matches_wall_clock_time(
        micros in 1_500_000_000_000_000..2_000_000_000_000_000_u64,
        zone in prop::sample::select(ZONES.to_vec()),
        from in 0..24 * 60_u16,
        to in 0..=24 * 60_u16,
        day in prop::sample::select(vec!["mon", "tue", "wed", "thu", "fri", "sat", "sun"]),
    ) {
        prop_assume!(from != to);
        let text = |minute: u16| format!("{:02}:{:02}", minute / 60, minute % 60);
        let (from, to) = (text(from), text(to));
        let schedule = schedule(&[&format!("{from}-{to}")], day, zone);

        let instant = jiff::Timestamp::from_microsecond(micros.try_into().unwrap()).unwrap();
        let zoned = instant.to_zoned(TimeZone::get(zone).unwrap());
        let wall = zoned.strftime("%H:%M").to_string();
        let date: Date = zoned.date();
        let (today, yesterday) = (name(date.weekday()), name(date.yesterday().unwrap().weekday()));
        let expected = if from < to {
            from <= wall && wall < to && day == today
        } else {
            (from <= wall && day == today) || (wall < to && day == yesterday)
        };
        prop_assert_eq!(schedule.holds(Timestamp::from_micros(micros)), expected, "{}", zoned);
    }
}
