//! Tests calendar windows against the time zone database. Around every offset change of every zone,
//! each instant is in the correct window, and the windows are contiguous.

use jiff::{Timestamp as Instant, ToSpan, civil::Date, tz::TimeZone};
use proptest::prelude::*;
use tidegate_core::{Calendar, CalendarUnit, Timestamp};

const HOUR: u64 = 3_600_000_000;
const DAY: u64 = 24 * HOUR;

fn at(text: &str) -> u64 {
    let instant: Instant = text.parse().expect("an RFC 3339 instant");
    u64::try_from(instant.as_microsecond()).expect("after 1970")
}

fn window(calendar: &Calendar, now: u64) -> (u64, u64) {
    let (start, end) = calendar.window(Timestamp::from_micros(now));
    (start.as_micros(), end.as_micros())
}

fn days(zone: &str) -> Calendar {
    Calendar::new(CalendarUnit::Day, zone, None).expect("a zone of the database")
}

/// Returns the local date at an instant, computed directly from the time zone database.
fn date(zone: &TimeZone, micros: u64) -> Date {
    let micros = i64::try_from(micros).expect("an instant before 2255");
    let instant = Instant::from_microsecond(micros).expect("an instant before 2255");
    zone.to_datetime(instant).date()
}

/// Asserts that the window for `now` contains `now`, that its first and its last instant have the
/// same window, and that the next window begins where it ends.
fn assert_sound(calendar: &Calendar, now: u64) {
    let (start, end) = window(calendar, now);
    let name = format!("{calendar} at {now}: [{start}, {end})");
    assert!(
        start <= now && now < end,
        "does not hold its instant: {name}"
    );
    assert_eq!(window(calendar, start), (start, end), "its start: {name}");
    assert_eq!(
        window(calendar, end - 1),
        (start, end),
        "its last microsecond: {name}"
    );
    assert_eq!(window(calendar, end).0, end, "not contiguous: {name}");
    if start > 0 {
        assert_eq!(
            window(calendar, start - 1).1,
            start,
            "not contiguous: {name}"
        );
    }
}

/// Returns the instants from 1970 to 2037 at which the zone's offset changes.
fn changes(zone: &TimeZone) -> Vec<u64> {
    let end: Instant = "2038-01-01T00:00:00Z".parse().expect("an instant");
    let after = zone.following(Instant::UNIX_EPOCH);
    after
        .map(|change| change.timestamp())
        .take_while(|change| *change < end)
        .map(|change| u64::try_from(change.as_microsecond()).expect("after 1970"))
        .collect()
}

/// At several instants around every offset change of every zone, a day begins with the first
/// instant of its date.
#[test]
fn every_transition_of_every_zone() {
    let mut checked = 0;
    for name in jiff::tz::db().available() {
        let zone = TimeZone::get(name.as_str()).expect("the database knows its zones");
        let calendar = days(name.as_str());
        for change in changes(&zone) {
            for now in [
                change - DAY,
                change - 1,
                change,
                change + HOUR / 2,
                change + 2 * HOUR,
            ] {
                assert_sound(&calendar, now);
                let start = window(&calendar, now).0;
                let (first, before) = (date(&zone, start), date(&zone, start - 1));
                assert!(before < first, "{calendar}: {first} begins before {start}");
                assert!(
                    date(&zone, now) <= first || now == start,
                    "{calendar} at {now}"
                );
                checked += 1;
            }
        }
    }
    assert!(checked > 100_000, "the database has changes: {checked}");
}

#[test]
fn days_have_23_and_25_hours_when_the_clocks_change() {
    let berlin = days("Europe/Berlin");
    let spring = window(&berlin, at("2026-03-29T12:00:00Z"));
    assert_eq!(
        spring,
        (at("2026-03-28T23:00:00Z"), at("2026-03-29T22:00:00Z"))
    );
    let autumn = window(&berlin, at("2026-10-25T12:00:00Z"));
    assert_eq!(
        autumn,
        (at("2026-10-24T22:00:00Z"), at("2026-10-25T23:00:00Z"))
    );
    assert_eq!(
        ((spring.1 - spring.0) / HOUR, (autumn.1 - autumn.0) / HOUR),
        (23, 25)
    );
}

/// If a clock change skips midnight, the day begins at the first instant after the gap.
#[test]
fn days_that_have_no_midnight() {
    let sao_paulo = window(&days("America/Sao_Paulo"), at("2017-10-15T12:00:00Z"));
    assert_eq!(
        sao_paulo,
        (at("2017-10-15T03:00:00Z"), at("2017-10-16T02:00:00Z"))
    );
    let beirut = window(&days("Asia/Beirut"), at("2022-03-27T12:00:00Z"));
    assert_eq!(
        beirut,
        (at("2022-03-26T22:00:00Z"), at("2022-03-27T21:00:00Z"))
    );
}

/// If midnight occurs twice, the day begins with the first midnight, and the repeated hour belongs
/// to this day.
#[test]
fn days_with_two_midnights() {
    let havana = window(&days("America/Havana"), at("2025-11-02T04:30:00Z"));
    assert_eq!(
        havana,
        (at("2025-11-02T04:00:00Z"), at("2025-11-03T05:00:00Z"))
    );
}

#[test]
fn months_begin_on_their_last_day_where_the_anchor_is_missing() {
    let billing = Calendar::new(CalendarUnit::Month, "UTC", Some(31)).unwrap();
    let starts = [
        "2027-12-31",
        "2028-01-31",
        "2028-02-29",
        "2028-03-31",
        "2028-04-30",
        "2028-05-31",
    ];
    for pair in starts.windows(2) {
        let (start, end) = (
            at(&format!("{}T00:00:00Z", pair[0])),
            at(&format!("{}T00:00:00Z", pair[1])),
        );
        assert_eq!(window(&billing, start), (start, end));
        assert_eq!(window(&billing, end - 1), (start, end));
    }
}

#[test]
fn weeks_begin_on_their_anchor() {
    let sunday = Calendar::new(CalendarUnit::Week, "UTC", Some(7)).unwrap();
    let (start, end) = window(&sunday, at("2026-11-21T12:00:00Z"));
    assert_eq!(
        (start, end),
        (at("2026-11-15T00:00:00Z"), at("2026-11-22T00:00:00Z"))
    );
}

proptest! {
    /// For any calendar, an instant's window contains the instant, and adjacent windows are
    /// contiguous. The instants include times in 1970, before the first whole window.
    #[test]
    fn windows_hold_their_instants(
        zone in prop::sample::select(vec![
            "UTC", "Europe/Berlin", "America/Sao_Paulo", "Asia/Beirut", "America/St_Johns", "Pacific/Apia",
            "America/Havana", "Asia/Kathmandu", "Africa/Cairo", "Australia/Lord_Howe", "Antarctica/Troll",
        ]),
        unit in prop::sample::select(vec![
            CalendarUnit::Day,
            CalendarUnit::Week,
            CalendarUnit::Month,
        ]),
        day in 1..=31_i8,
        now in prop_oneof![0..5_000_000_000_000_000_u64, 0..40 * DAY],
    ) {
        let day = match unit {
            CalendarUnit::Day => None,
            CalendarUnit::Week => Some(day % 7 + 1),
            CalendarUnit::Month => Some(day),
        };
        let calendar = Calendar::new(unit, zone, day).expect("a valid calendar");
        assert_sound(&calendar, now);
        let (start, end) = window(&calendar, now);
        let first = date(&TimeZone::get(zone).expect("a zone"), start);
        match unit {
            CalendarUnit::Week => {
                let weekday = first.weekday().to_monday_one_offset();
                prop_assert!(start == 0 || weekday == day.unwrap_or(1));
                prop_assert!(start == 0 || (end - start).abs_diff(7 * DAY) <= 25 * HOUR);
            }
            CalendarUnit::Month => {
                let wanted = day.unwrap_or(1).min(first.days_in_month());
                // Apia skipped December 30, 2011, so a window that would begin on that day begins
                // on December 31.
                let skipped = first.checked_sub(1.day()).is_ok_and(|before| before.day() == wanted);
                prop_assert!(start == 0 || first.day() == wanted || skipped, "{first} for {day:?}");
            }
            CalendarUnit::Day => {
                prop_assert!(start == 0 || (end - start).abs_diff(DAY) <= 24 * HOUR);
            }
        }
    }
}
