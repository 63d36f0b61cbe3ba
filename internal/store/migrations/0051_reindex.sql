-- Searches look for fields that the index did not have: it is made anew, by the next
-- holders of the keys who search.
update message set segment_id = '' where segment_id <> '';
delete from mail_segment_text;
delete from mail_segment;
