(* Generated from the events of internal/oversight by TestProofRules: do not edit.

   Each rule is a function of what the event in Go looks at. It was made by running
   the event on every combination, 5 times each with other values of everything
   else. Questions that do not matter where they stand are left out. *)

From Coq Require Import List.
Import ListNotations.
Require Import words.

(* An action is proposed; policy says said about it. *)
Definition proposed (new : bool) (stop : bool) (said : verdict) (ask : bool) (later : bool) : answer :=
  if new then (
    if stop then Moves Denied [NextVersion; NewBytes; ByNobody; Told]
    else match said with
    | Allow => if ask then (
          if later then Moves Scheduled [NextVersion; NewBytes; NewNeed; ByNobody; Deadline; Told]
          else Moves Pending [NextVersion; NewBytes; NewNeed; ByNobody; Deadline; Told])
        else Moves Approved [NextVersion; NewBytes; NewNeed; ByNobody; Told]
    | Ask => if later then Moves Scheduled [NextVersion; NewBytes; NewNeed; ByNobody; Deadline; Told]
        else Moves Pending [NextVersion; NewBytes; NewNeed; ByNobody; Deadline; Told]
    | Deny => Moves Denied [NextVersion; NewBytes; ByNobody; Told]
    end)
  else Refused Stale.

(* Somebody replaces the content; current: they name no version, or this one; same: kind and inbox are the action's. *)
Definition revised (who : writer) (current : bool) (st : state) (tried : bool) (same : bool) (stop : bool) (said : verdict) (ask : bool) (later : bool) : answer :=
  match who with
  | Reviewer => if current then (
        match st with
        | Scheduled | Pending | Approved => if tried then Refused TooLate
            else if same then (
              if stop then Moves Denied [NextVersion; NewBytes; ByNobody; Told]
              else match said with
              | Deny => Moves Denied [NextVersion; NewBytes; ByNobody; Told]
              | _ => if later then Moves Scheduled [NextVersion; NewBytes; NewNeed; ByNobody; Deadline; Told]
                  else Moves Pending [NextVersion; NewBytes; NewNeed; ByNobody; Deadline; Told]
              end)
            else Refused Stale
        | _ => Refused TooLate
        end)
      else Refused Stale
  | Program => if current then (
        match st with
        | Scheduled | Pending | Approved => if tried then Refused TooLate
            else if same then (
              if stop then Moves Denied [NextVersion; NewBytes; ByNobody; Told]
              else match said with
              | Allow => if ask then (
                    if later then Moves Scheduled [NextVersion; NewBytes; NewNeed; ByNobody; Deadline; Told]
                    else Moves Pending [NextVersion; NewBytes; NewNeed; ByNobody; Deadline; Told])
                  else Moves Approved [NextVersion; NewBytes; NewNeed; ByNobody; Told]
              | Ask => if later then Moves Scheduled [NextVersion; NewBytes; NewNeed; ByNobody; Deadline; Told]
                  else Moves Pending [NextVersion; NewBytes; NewNeed; ByNobody; Deadline; Told]
              | Deny => Moves Denied [NextVersion; NewBytes; ByNobody; Told]
              end)
            else Refused Stale
        | _ => Refused TooLate
        end)
      else Refused Stale
  | _ => Refused Forbidden
  end.

(* The time to ask people has come. *)
Definition time_came (st : state) (passed : bool) : answer :=
  match st with
  | Scheduled => if passed then Moves Pending [NextVersion]
      else Refused Stale
  | _ => Refused Stale
  end.

(* The time to decide has ended. *)
Definition time_ended (st : state) (expired : bool) (tried : bool) : answer :=
  match st with
  | Pending => if expired then (
        if tried then Moves Failed [NextVersion; BySystem; Told]
        else Moves Denied [NextVersion; BySystem; Told])
      else Refused Stale
  | _ => Refused Stale
  end.

(* A person decides; decides: they may; intact: the payload has its digest; shown: that digest was shown;
   asked: policy asks them; seen: they ticked each grave finding; strong: with a second factor, if one is needed; admitted: they are nobody who does
   not count; late: after its send time; enough: with theirs there are as many approvals as are needed. *)
Definition decided (decides : bool) (intact : bool) (shown : bool) (st : state) (current : bool) (expired : bool) (asked : bool) (approve : bool) (seen : bool) (admitted : bool) (strong : bool) (stop : bool) (late : bool) (enough : bool) (tried : bool) : answer :=
  if decides then (
    if intact then (
      if shown then (
        match st with
        | Pending => if current then (
              if expired then Refused Stale
              else if asked then (
                if approve then (
                  if seen then (
                    if admitted then (
                      if strong then (
                        if stop then Refused Stopped
                        else if late then Moves Pending [NextVersion]
                        else if enough then Moves Approved [NextVersion; ByPerson; Told]
                        else Moves Pending [])
                      else Refused StepUp)
                    else Refused NotCounted)
                  else Refused Unseen)
                else if tried then Moves Failed [NextVersion; ByPerson; Told]
                else Moves Denied [NextVersion; ByPerson; Told])
              else Refused NotAsked)
            else Refused Stale
        | _ => Refused Stale
        end)
      else Refused Stale)
    else Refused Stale)
  else Refused Forbidden.

(* Somebody withdraws it. *)
Definition cancelled (who : writer) (st : state) (tried : bool) : answer :=
  match who with
  | Looker | OtherSandbox => Refused Forbidden
  | _ => match st with
      | Scheduled | Pending | Approved => if tried then Refused TooLate
          else Moves Cancelled [NextVersion; Told]
      | Cancelled => Stays
      | _ => Refused TooLate
      end
  end.

(* A program takes it to execute it; judge: with a new verdict; ruled: no person has decided. *)
Definition claimed (st : state) (due : bool) (stop : bool) (judge : bool) (ruled : bool) (said : verdict) (tried : bool) : answer :=
  match st with
  | Approved => if due then (
        if stop then (
          if tried then Moves Failed [NextVersion; BySystem; Told]
          else Moves Denied [NextVersion; BySystem; Told])
        else if judge then (
          if ruled then (
            match said with
            | Allow => Moves Executing [NextVersion; OneMore; Leased; Told]
            | Ask => Moves Pending [NextVersion; NewNeed; Deadline; Told]
            | Deny => if tried then Moves Failed [NextVersion; BySystem; Told]
                else Moves Denied [NextVersion; BySystem; Told]
            end)
          else Moves Executing [NextVersion; OneMore; Leased])
        else Moves Executing [NextVersion; OneMore; Leased])
      else Refused Stale
  | _ => Refused Stale
  end.

(* The program that executes it renews its lease. *)
Definition held (st : state) (current : bool) : answer :=
  match st with
  | Executing => if current then Moves Executing [Leased]
      else Refused Stale
  | _ => Refused Stale
  end.

(* A program is about to begin a part; halted: it may not; stop: a switch that stops it is on. *)
Definition begun (st : state) (current : bool) (halted : bool) (stop : bool) : answer :=
  match st with
  | Executing => if current then (
        if halted then Refused Stopped
        else if stop then Refused Stopped
        else Moves Executing [])
      else Refused Stale
  | _ => Refused Stale
  end.

(* An execution ended with an outcome; ours: it was not recovered, or its program is gone; free: it began nothing. *)
Definition ended (st : state) (current : bool) (ours : bool) (to : state) (free : bool) (halted : bool) (stop : bool) (tried : tries) : answer :=
  match st with
  | Executing => if current then (
        if ours then (
          match to with
          | Approved => if free then (
                if halted then (
                  match tried with
                  | MoreTries => Moves Failed [NextVersion; BySystem; OneLess; Told]
                  | _ => Moves Denied [NextVersion; BySystem; OneLess; Told]
                  end)
                else if stop then (
                  match tried with
                  | MoreTries => Moves Failed [NextVersion; BySystem; OneLess; Halt; Told]
                  | _ => Moves Denied [NextVersion; BySystem; OneLess; Halt; Told]
                  end)
                else Moves Approved [NextVersion; OneLess; Told])
              else if halted then (
                match tried with
                | NoTry => Moves Denied [NextVersion; BySystem; Told]
                | _ => Moves Failed [NextVersion; BySystem; Told]
                end)
              else if stop then (
                match tried with
                | NoTry => Moves Denied [NextVersion; BySystem; Halt; Told]
                | _ => Moves Failed [NextVersion; BySystem; Halt; Told]
                end)
              else Moves Approved [NextVersion; Told]
          | Done => Moves Done [NextVersion; Told]
          | Failed => Moves Failed [NextVersion; Told]
          | _ => Moves Unknown [NextVersion; Told]
          end)
        else Refused Stale)
      else Refused Stale
  | _ => Refused Stale
  end.

(* A switch that stops it is turned on. *)
Definition switched (st : state) (halted : bool) (tried : bool) : answer :=
  match st with
  | Approved => if tried then Moves Failed [NextVersion; BySystem; Told]
      else Moves Denied [NextVersion; BySystem; Told]
  | Executing => if halted then Stays
      else Moves Executing [Halt]
  | Unknown => if halted then Stays
      else Moves Unknown [Halt]
  | _ => Stays
  end.

(* A person says what became of it; changed: its row was found changed. *)
Definition resolved (decides : bool) (to : state) (st : state) (current : bool) (halted : bool) (stop : bool) (changed : bool) : answer :=
  if decides then (
    match to with
    | Approved => match st with
        | Unknown => if current then (
              if halted then Refused Stopped
              else if stop then Refused Stopped
              else if changed then Moves Pending [NextVersion; Deadline; Told]
              else Moves Approved [NextVersion; Told])
            else Refused Stale
        | _ => Refused Stale
        end
    | Done => match st with
        | Unknown => if current then Moves Done [NextVersion; Told]
            else Refused Stale
        | _ => Refused Stale
        end
    | Failed => match st with
        | Unknown => if current then Moves Failed [NextVersion; Told]
            else Refused Stale
        | _ => Refused Stale
        end
    | _ => Refused Invalid
    end)
  else Refused Forbidden.

(* Its row is not what this program wrote; entries, record and began: what the audit says; ends: an execution has just ended; st and tried: what the row says. *)
Definition distrusted (entries : bool) (record : option state) (began : bool) (ends : bool) (st : state) (tried : bool) (stop : bool) (said : verdict) : answer :=
  if entries then (
    match record with
    | None => if began then (
          if tried then Moves Unknown [Beyond; StricterNeed; ByNobody; Told]
          else Moves Unknown [Beyond; StricterNeed; ByNobody; AtLeastOne; Told])
        else if ends then (
          if tried then Moves Unknown [Beyond; StricterNeed; ByNobody; Told]
          else Moves Unknown [Beyond; StricterNeed; ByNobody; AtLeastOne; Told])
        else match st with
        | Executing | Unknown => if tried then Moves Unknown [Beyond; StricterNeed; ByNobody; Told]
            else Moves Unknown [Beyond; StricterNeed; ByNobody; AtLeastOne; Told]
        | _ => if tried then Moves Unknown [Beyond; StricterNeed; ByNobody; Told]
            else if stop then Moves Denied [Beyond; BySystem; Told]
            else match said with
            | Deny => Moves Denied [Beyond; BySystem; Told]
            | _ => Moves Pending [Beyond; StricterNeed; ByNobody; Deadline; Told]
            end
        end
    | Some Denied => if began then (
          if tried then Moves Denied [Beyond; BySystem; Told]
          else Moves Denied [Beyond; BySystem; AtLeastOne; Told])
        else if ends then (
          if tried then Moves Denied [Beyond; BySystem; Told]
          else Moves Denied [Beyond; BySystem; AtLeastOne; Told])
        else Moves Denied [Beyond; BySystem; Told]
    | Some Done => if began then (
          if tried then Moves Done [Beyond; BySystem; Told]
          else Moves Done [Beyond; BySystem; AtLeastOne; Told])
        else if ends then (
          if tried then Moves Done [Beyond; BySystem; Told]
          else Moves Done [Beyond; BySystem; AtLeastOne; Told])
        else Moves Done [Beyond; BySystem; Told]
    | Some Failed => if began then (
          if tried then Moves Failed [Beyond; BySystem; Told]
          else Moves Failed [Beyond; BySystem; AtLeastOne; Told])
        else if ends then (
          if tried then Moves Failed [Beyond; BySystem; Told]
          else Moves Failed [Beyond; BySystem; AtLeastOne; Told])
        else Moves Failed [Beyond; BySystem; Told]
    | Some Cancelled => if began then (
          if tried then Moves Cancelled [Beyond; BySystem; Told]
          else Moves Cancelled [Beyond; BySystem; AtLeastOne; Told])
        else if ends then (
          if tried then Moves Cancelled [Beyond; BySystem; Told]
          else Moves Cancelled [Beyond; BySystem; AtLeastOne; Told])
        else Moves Cancelled [Beyond; BySystem; Told]
    | _ => if began then (
          if tried then Moves Unknown [Beyond; StricterNeed; ByNobody; Told]
          else Moves Unknown [Beyond; StricterNeed; ByNobody; AtLeastOne; Told])
        else if ends then (
          if tried then Moves Unknown [Beyond; StricterNeed; ByNobody; Told]
          else Moves Unknown [Beyond; StricterNeed; ByNobody; AtLeastOne; Told])
        else if tried then (
          if stop then Moves Failed [Beyond; BySystem; Told]
          else match said with
          | Deny => Moves Failed [Beyond; BySystem; Told]
          | _ => Moves Pending [Beyond; StricterNeed; ByNobody; Deadline; Told]
          end)
        else if stop then Moves Denied [Beyond; BySystem; Told]
        else match said with
        | Deny => Moves Denied [Beyond; BySystem; Told]
        | _ => Moves Pending [Beyond; StricterNeed; ByNobody; Deadline; Told]
        end
    end)
  else match record with
  | None => if began then (
        if tried then Moves Failed [Beyond; BySystem; Told]
        else Moves Failed [Beyond; BySystem; AtLeastOne; Told])
      else if ends then (
        if tried then Moves Failed [Beyond; BySystem; Told]
        else Moves Failed [Beyond; BySystem; AtLeastOne; Told])
      else match st with
      | Executing | Unknown => if tried then Moves Failed [Beyond; BySystem; Told]
          else Moves Failed [Beyond; BySystem; AtLeastOne; Told]
      | _ => if tried then Moves Failed [Beyond; BySystem; Told]
          else Moves Denied [Beyond; BySystem; Told]
      end
  | _ => if began then (
        if tried then Moves Failed [Beyond; BySystem; Told]
        else Moves Failed [Beyond; BySystem; AtLeastOne; Told])
      else if ends then (
        if tried then Moves Failed [Beyond; BySystem; Told]
        else Moves Failed [Beyond; BySystem; AtLeastOne; Told])
      else if tried then Moves Failed [Beyond; BySystem; Told]
      else Moves Denied [Beyond; BySystem; Told]
  end.

(* A program looks at what it is to execute; same: the payload has the digest that was approved. *)
Definition intact (same : bool) : answer :=
  if same then Moves Executing []
  else Refused Tampered.

(* It is still to be done, and no person is asked first. *)
Definition part_open (asked : bool) (pst : part_state) : bool :=
  match pst with
  | PQueued | PDeferred => true
  | _ => false
  end.

(* Its effect is about to begin. *)
Definition part_begins (asked : bool) (pst : part_state) : part_answer :=
  if asked then (
    match pst with
    | PQueued | PDeferred => PMoves PSending true true
    | _ => PRefused
    end)
  else match pst with
  | PQueued | PDeferred => PMoves PSending false true
  | _ => PRefused
  end.

(* An attempt has a result; last: it is the one that began last. *)
Definition part_ends (last : bool) (asked : bool) (pst : part_state) (to : part_state) : part_answer :=
  if last then (
    if asked then (
      match pst with
      | PSending => match to with
          | PQueued => PMoves PQueued false false
          | PSending => PMoves PSending false false
          | PDelivered => PMoves PDelivered false false
          | PDeferred => PMoves PDeferred false false
          | PBounced => PMoves PBounced false false
          | PSuppressed => PMoves PSuppressed false false
          | PUncertain => PMoves PUncertain false false
          | PCancelled => PMoves PCancelled false false
          end
      | _ => match to with
          | PDelivered => PMoves PDelivered false false
          | _ => PRefused
          end
      end)
    else match pst with
    | PSending => match to with
        | PQueued => PMoves PQueued false false
        | PSending => PKeeps
        | PDelivered => PMoves PDelivered false false
        | PDeferred => PMoves PDeferred false false
        | PBounced => PMoves PBounced false false
        | PSuppressed => PMoves PSuppressed false false
        | PUncertain => PMoves PUncertain false false
        | PCancelled => PMoves PCancelled false false
        end
    | PDelivered => match to with
        | PDelivered => PKeeps
        | _ => PRefused
        end
    | _ => match to with
        | PDelivered => PMoves PDelivered false false
        | _ => PRefused
        end
    end)
  else PRefused.

(* Its program stopped. *)
Definition part_interrupted (asked : bool) (pst : part_state) : part_answer :=
  if asked then (
    match pst with
    | PSending => PMoves PUncertain true false
    | _ => PKeeps
    end)
  else match pst with
  | PSending => PMoves PUncertain false false
  | _ => PKeeps
  end.

(* Its action has moved. *)
Definition part_follows (st : state) (asked : bool) (pst : part_state) : part_answer :=
  match st with
  | Denied | Cancelled => if asked then (
        match pst with
        | PQueued | PDeferred => PMoves PCancelled true false
        | _ => PKeeps
        end)
      else match pst with
      | PQueued | PDeferred => PMoves PCancelled false false
      | _ => PKeeps
      end
  | Approved => if asked then PMoves PQueued false false
      else PKeeps
  | Done => if asked then PMoves PDelivered false false
      else PKeeps
  | Failed => if asked then PMoves PBounced false false
      else match pst with
      | PQueued | PDeferred => PMoves PCancelled false false
      | _ => PKeeps
      end
  | Unknown => if asked then (
        match pst with
        | PSending => PMoves PUncertain true false
        | _ => PKeeps
        end)
      else match pst with
      | PSending | PUncertain => PMoves PUncertain true false
      | _ => PKeeps
      end
  | _ => PKeeps
  end.
