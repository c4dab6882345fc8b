//! Numbered slots for requests in flight. A number is used again when its slot is free, which bounds memory.

pub struct Slots<T> {
    slots: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slots<T> {
    fn default() -> Slots<T> {
        Slots { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slots<T> {
    /// Stores `value` and returns its number. The free slot that was used last is taken first.
    #[inline]
    pub fn insert(&mut self, value: T) -> u64 {
        let Some(number) = self.free.pop() else {
            self.slots.push(Some(value));
            return self.slots.len() as u64 - 1;
        };
        self.slots[number as usize] = Some(value);
        number.into()
    }

    #[inline]
    pub fn get(&self, number: u64) -> Option<&T> {
        self.slots.get(number as usize)?.as_ref()
    }

    #[inline]
    pub fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        self.slots.get_mut(number as usize)?.as_mut()
    }

    #[inline]
    pub fn take(&mut self, number: u64) -> Option<T> {
        let value = self.slots.get_mut(number as usize)?.take()?;
        self.free.push(number as u32);
        Some(value)
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().flatten()
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_take_memory_for_the_peak_number_of_values_only() {
        let mut slots = Slots::default();
        let (one, other) = (slots.insert('a'), slots.insert('b'));
        for value in 'c'..='z' {
            assert_eq!(slots.take(one).map(|_| slots.len()), Some(1));
            assert_eq!(slots.take(one), None);
            assert_eq!(slots.get(one), None);
            assert_eq!(slots.insert(value), one);
        }
        assert_eq!(slots.get_mut(other), Some(&mut 'b'));
        assert_eq!((slots.len(), slots.slots.len()), (2, 2));
        assert_eq!(slots.take(7), None);
    }
}
