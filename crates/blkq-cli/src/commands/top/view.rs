//! The state of the view: sorting, filter, selection and page, and how keys change it.

use super::devices::Devices;
use super::row::{COLUMNS, Row};
use super::terminal::Key;

const PAGE_ROWS: usize = 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    None,
    Quit,
    Suspend,
    Redraw,
}

#[derive(Default)]
pub struct View {
    pub devices: Devices,
    /// Shown in the title, such as `1 s`.
    pub interval: String,
    /// The index of the column in [`COLUMNS`] by which the rows are sorted; `None` for the name.
    pub sort: Option<usize>,
    /// Without this, the largest value comes first, and names are in alphabetical order.
    pub reversed: bool,
    /// Only devices whose names contain this text are shown. Case is ignored.
    pub filter: String,
    pub is_editing: bool,
    /// The name of the selected device. If that device is not shown, the first row is selected.
    pub selected: Option<String>,
    /// The page of the selected device is shown, not the list.
    pub is_page: bool,
    /// The first row of the list that was visible when the list was last drawn.
    pub top_row: usize,
}

impl View {
    pub fn new(interval: String) -> View {
        View { interval, sort: Some(0), ..View::default() }
    }

    pub fn rows(&self) -> Vec<Row> {
        let filter = self.filter.to_lowercase();
        let mut rows = self.devices.rows();
        rows.retain(|row| row.name.to_lowercase().contains(&filter));
        rows.sort_by(|a, b| {
            let order = match self.sort {
                None => a.name.cmp(&b.name),
                Some(at) => {
                    // A row whose value is unknown comes last.
                    let [a, b] = [a, b].map(|row| (COLUMNS[at].value)(row).unwrap_or(-1.0));
                    b.total_cmp(&a)
                }
            };
            let order = if self.reversed { order.reverse() } else { order };
            order.then_with(|| a.name.cmp(&b.name))
        });
        rows
    }

    pub fn selected_index(&self, rows: &[Row]) -> usize {
        rows.iter().position(|row| Some(&row.name) == self.selected.as_ref()).unwrap_or(0)
    }

    pub fn press(&mut self, key: Key) -> Action {
        match key {
            Key::Control('c') => return Action::Quit,
            Key::Control('z') => return Action::Suspend,
            Key::Control('l') => return Action::Redraw,
            _ if self.is_editing => self.edit(key),
            Key::Char('q') => return Action::Quit,
            Key::Up | Key::Char('k') => self.move_by(-1),
            Key::Down | Key::Char('j') => self.move_by(1),
            Key::PageUp => self.move_by(-(PAGE_ROWS as isize)),
            Key::PageDown => self.move_by(PAGE_ROWS as isize),
            Key::Home | Key::Char('g') => self.move_by(isize::MIN),
            Key::End | Key::Char('G') => self.move_by(isize::MAX),
            Key::Enter | Key::Right if !self.is_page => {
                self.move_by(0);
                self.is_page = self.selected.is_some();
            }
            Key::Escape | Key::Left | Key::Backspace if self.is_page => self.is_page = false,
            Key::Escape => self.filter.clear(),
            Key::Char('/') if !self.is_page => self.is_editing = true,
            Key::Char('s') => self.sort_by_next(1),
            Key::Char('S') => self.sort_by_next(COLUMNS.len()),
            Key::Char('r') => self.reversed = !self.reversed,
            _ => {}
        }
        Action::None
    }

    fn edit(&mut self, key: Key) {
        match key {
            Key::Char(c) => self.filter.push(c),
            Key::Backspace => drop(self.filter.pop()),
            Key::Control('u') => self.filter.clear(),
            Key::Enter => self.is_editing = false,
            Key::Escape => {
                self.filter.clear();
                self.is_editing = false;
            }
            Key::Up | Key::Down => {
                self.is_editing = false;
                self.press(key);
            }
            _ => {}
        }
    }

    /// Advances by this number of orders, of which the last one is followed by the first, the name.
    fn sort_by_next(&mut self, orders: usize) {
        let at = self.sort.map_or(0, |at| at + 1) + orders;
        self.sort = (at % (COLUMNS.len() + 1)).checked_sub(1);
    }

    fn move_by(&mut self, rows_down: isize) {
        let rows = self.rows();
        let last = rows.len().saturating_sub(1);
        let at = self.selected_index(&rows).saturating_add_signed(rows_down).min(last);
        self.selected = rows.get(at).map(|row| row.name.clone());
    }
}

#[cfg(test)]
pub mod tests {
    use std::time::Instant;

    use super::super::devices::tests::statistics;
    use super::*;

    /// `devices` are names and reads per second. All latencies are 300 us.
    pub fn view(devices: &[(&str, u64)]) -> View {
        let mut view = View::new("1 s".to_owned());
        let names: Vec<String> = devices.iter().map(|(name, _)| (*name).to_owned()).collect();
        for second in 0..2 {
            view.devices.asked(names.clone(), Instant::now());
            for (name, iops) in devices {
                view.devices.answered(name, Ok(Some(statistics(second, second * iops, 300_000))));
            }
        }
        view
    }

    fn names(view: &View) -> Vec<String> {
        view.rows().into_iter().map(|row| row.name).collect()
    }

    #[test]
    fn rows_are_sorted_by_a_column_and_filtered_by_name() {
        let mut view = view(&[("Alpha", 10), ("beta", 500), ("gamma", 10)]);
        assert_eq!(names(&view), ["beta", "Alpha", "gamma"]);
        view.press(Key::Char('r'));
        assert_eq!(names(&view), ["Alpha", "gamma", "beta"]);
        view.press(Key::Char('r'));
        view.press(Key::Char('S'));
        assert_eq!((view.sort, names(&view)), (None, vec!["Alpha".into(), "beta".into(), "gamma".into()]));
        for key in
            [Key::Char('/'), Key::Char('A'), Key::Char('q'), Key::Backspace, Key::Char('l'), Key::Enter]
        {
            assert_eq!(view.press(key), Action::None);
        }
        assert_eq!((view.filter.as_str(), names(&view)), ("Al", vec!["Alpha".to_owned()]));
        view.press(Key::Escape);
        assert_eq!(names(&view).len(), 3);
        assert_eq!(view.press(Key::Char('q')), Action::Quit);
    }

    #[test]
    fn the_sort_key_cycles_through_all_columns() {
        let mut view = view(&[("a", 1)]);
        let first = view.sort;
        let mut seen = Vec::new();
        for _ in 0..=COLUMNS.len() {
            seen.push(view.sort);
            view.press(Key::Char('s'));
        }
        assert_eq!(view.sort, first);
        assert!((0..COLUMNS.len()).map(Some).chain([None]).all(|sort| seen.contains(&sort)));
    }

    #[test]
    fn the_selection_stays_with_its_device() {
        let mut view = view(&[("a", 300), ("b", 200), ("c", 100)]);
        view.press(Key::Down);
        assert_eq!(view.selected.as_deref(), Some("b"));
        view.press(Key::Char('r'));
        view.press(Key::Down);
        assert_eq!(view.selected.as_deref(), Some("a"));
        view.press(Key::End);
        view.press(Key::Down);
        assert_eq!(view.selected.as_deref(), Some("a"), "the last of the reversed order");
        view.press(Key::Enter);
        assert!(view.is_page);
        view.press(Key::Up);
        assert_eq!((view.selected.as_deref(), view.is_page), (Some("b"), true));
        view.press(Key::Escape);
        assert!(!view.is_page);
        // When the selected device is detached, the first row is selected.
        view.devices.asked(vec!["c".to_owned()], Instant::now());
        assert_eq!(view.selected_index(&view.rows()), 0);
    }

    #[test]
    fn keys_do_nothing_harmful_without_devices() {
        let mut view = View::new("1 s".to_owned());
        for key in [Key::Up, Key::End, Key::Enter, Key::PageDown, Key::Escape, Key::Char('s'), Key::Home] {
            assert_eq!(view.press(key), Action::None);
        }
        assert!(!view.is_page);
        assert_eq!(view.press(Key::Control('z')), Action::Suspend);
        assert_eq!(view.press(Key::Control('c')), Action::Quit);
    }
}
