(* The world around the rules: one action, with versions, digests, people, parts and
   programs without bound. Whatever can happen to it is an input, and step says what
   becomes of the world then. Only the rules, from rules.v, say what the gate answers.

   What an input brings along is free: which person decides, when, on what; what
   policy says; which program goes on after how long. Only fair, below, restricts it. *)

From Coq Require Import List Arith Bool.
Import ListNotations.
Require Import words rules.

(* A row is what the database has of the action. *)
Record row := Row {
  st : state;
  ver : nat;
  payload : nat;    (* the bytes that are stored *)
  digest : nat;     (* the bytes whose digest is stored *)
  need : nat;       (* how many must approve *)
  ruled : bool;     (* it has no decider *)
  tried : nat;      (* executions that have begun *)
  halted : bool;    (* no further part may begin *)
  deadline : bool   (* there is a time by which people must decide *)
}.

Record part := Part { pst : part_state; asked : bool; attempts : nat }.

(* A claim is what a program holds that has taken the action. It is never removed:
   a program may go on at any time, also after others have taken it for dead. *)
Record claim := Claim { c_ver : nat; c_payload : nat; c_digest : nat }.

(* The history is no part of the system: it is what the theorems are about. It is
   written down from what people, policy and executors said, not from what the
   rules made of that, except where something moved. *)
Record history := History {
  yes : list (nat * nat * nat); (* (person, version, bytes): who approved, while they were asked and in time, with a second factor if one was needed, with a tick for each grave finding, having been shown these bytes *)
  allowed : option nat;  (* the bytes that policy allows, without a person *)
  wanted : nat;          (* how many people policy asks for *)
  fresh : bool;          (* it was approved after each switch that stops it was turned on *)
  ever : bool;           (* it was executed at least once *)
  doubt : bool;          (* its row was found changed while its effect was unknown *)
  open : list nat;       (* versions of claims which may have had an effect, and nobody has denied it *)
  denied : bool;         (* a person has said since it was last unknown that it did not happen *)
  outs : nat -> list nat (* of each part, the attempts that may have had an effect, and nobody has denied it *)
}.

Record world := World {
  now : row;
  votes : list (nat * nat);  (* (version, person): the approvals that are stored *)
  on : bool;                 (* a switch that stops it is on *)
  claims : list claim;
  parts : nat -> part;
  past : history
}.

Definition start := World (Row Denied 0 0 0 0 true 0 false false) [] false [] (fun _ => Part PQueued false 0)
  (History [] None 0 false false false [] false (fun _ => [])).

(* What an event brings along beside what it compares. *)
Record brings := Brings { b_bytes : nat; b_need : nat; b_above : nat }.

Definition change_row (b : brings) (r : row) (c : change) : row :=
  let '(Row s v p d n u t h dl) := r in
  match c with
  | NextVersion => Row s (S v) p d n u t h dl
  | Beyond => Row s (S (b_above b)) p d n u t h dl
  | NewBytes => Row s v (b_bytes b) (b_bytes b) n u t h dl
  | NewNeed | StricterNeed => Row s v p d (max (b_need b) 1) u t h dl
  | ByNobody => Row s v p d n true t h dl
  | ByPerson | BySystem => Row s v p d n false t h dl
  | OneMore => Row s v p d n u (S t) h dl
  | OneLess => Row s v p d n u (pred t) h dl
  | AtLeastOne => Row s v p d n u (max t 1) h dl
  | Halt => Row s v p d n u t true dl
  | Deadline => Row s v p d n u t h true
  | NoDeadline => Row s v p d n u t h false
  | Leased | Told => r
  end.

Definition goto (s : state) (r : row) : row :=
  let '(Row _ v p d n u t h dl) := r in Row s v p d n u t h dl.

(* The row after an answer, unless the answer is that it stays. *)
Definition after (a : answer) (b : brings) (r : row) : option row :=
  match a with
  | Moves s cs => Some (fold_left (change_row b) cs (goto s r))
  | Stays | Refused _ => None
  end.

Definition part_after (a : part_answer) (p : part) : part :=
  match a with
  | PMoves s q more => Part s q (if more then S (attempts p) else attempts p)
  | PKeeps | PRefused => p
  end.

(* The executor follows a move of its action to s with all parts. *)
Definition follow (s : state) (ps : nat -> part) : nat -> part :=
  fun n => part_after (part_follows s (asked (ps n)) (pst (ps n))) (ps n).

Definition interrupt (ps : nat -> part) : nat -> part :=
  fun n => part_after (part_interrupted (asked (ps n)) (pst (ps n))) (ps n).

(* Where a person said that a part did not happen, and the action goes back to be
   tried again, its attempts so far are denied. *)
Definition deny (s : state) (h : history) (ps : nat -> part) : nat -> list nat :=
  fun n => if (match s with Approved => true | _ => false end) && asked (ps n) && denied h then [] else outs h n.

Definition is_some (s : state) (t : state) : bool :=
  match s, t with
  | Scheduled, Scheduled | Pending, Pending | Denied, Denied | Approved, Approved | Executing, Executing
  | Done, Done | Failed, Failed | Unknown, Unknown | Cancelled, Cancelled => true
  | _, _ => false
  end.

Definition settled (s : state) : bool :=
  match s with Denied | Done | Failed | Cancelled => true | _ => false end.

Definition tries_of (n : nat) : tries := match n with 0 => NoTry | 1 => OneTry | _ => MoreTries end.
Definition any (n : nat) : bool := 1 <=? n.

(* A decision, with the answers to what the gate compares that is not in this world:
   times, who is asked, who wrote it. count is the quorum's way to count people. *)
Record decision := Decision {
  d_person : nat; d_version : nat; d_shown : nat; d_approve : bool;
  d_decides : bool; d_expired : bool; d_asked : bool; d_seen : bool; d_admitted : bool; d_strong : bool; d_late : bool;
  d_count : list nat -> nat
}.

Inductive input :=
  | Propose (bytes people : nat) (stops : bool) (v : verdict) (ask later : bool)
  | Revise (who : writer) (bytes people : nat) (stops : bool) (v : verdict) (current same ask later : bool)
  | TimeCame (passed : bool)
  | TimeEnded (expired : bool)
  | Decide (d : decision)
  | Cancel (who : writer)
  | Take (due judge : bool) (v : verdict) (people : nat)   (* a program claims it *)
  | Hold (c : claim)
  | Begin (c : claim) (n : nat)                            (* the program with claim c begins part n *)
  | Result (n attempt : nat) (to : part_state)             (* an attempt of part n has a result *)
  | End (version : nat) (gone ours : bool) (to : state) (free : bool)
  | SwitchOn
  | SwitchOff
  | Resolve (decides : bool) (to : state) (version : nat) (changed : bool)
  | Leave (person : nat)                                   (* an account is disabled: its approvals go *)
  | Tamper (bytes : nat)                                   (* somebody changes the payload in the database *)
  | Found (r : row) (entries : bool) (record : option state) (began ends : bool) (above people : nat) (v : verdict).
      (* the row was changed to r in the database, and the gate finds that out *)

Definition voters (v : nat) (vs : list (nat * nat)) : list nat :=
  map snd (filter (fun x => fst x =? v) vs).

(* What a rule moved: the row, the parts that follow, and the history with the changes
   that are the same for each move. *)
Definition moved (w : world) (r : row) (h : history) : world :=
  let s := st r in
  World r (votes w) (on w) (claims w) (follow s (parts w))
    (History (yes h) (allowed h) (wanted h) (fresh h) (ever h || is_some s Executing) (doubt h) (open h)
       (if is_some s Unknown then false else denied h) (deny s h (parts w))).

Definition same_version (a b : row) : bool := ver a =? ver b.

Definition says_allow (v : verdict) : bool := match v with Allow => true | _ => false end.

(* What is true of new content, whatever the rules make of it. *)
Definition new_content (h : history) (bytes people : nat) (by_rule : bool) (s : state) : history :=
  History (yes h) (if by_rule then Some bytes else None) people (is_some s Approved) (ever h) false (open h) (denied h) (outs h).

Definition step (w : world) (i : input) : option world :=
  let r := now w in let h := past w in
  match i with
  | Propose b n stops v ask later =>
      match after (proposed (ver r =? 0) stops v ask later) (Brings b n 0) r with
      | Some r' => Some (moved (World r (votes w) stops (claims w) (parts w) h) r'
          (new_content h b n (says_allow v && negb ask && negb stops) (st r')))
      | None => None
      end
  | Revise who b n stops v current same ask later =>
      match after (revised who current (st r) (any (tried r)) same stops v ask later) (Brings b n 0) r with
      | Some r' => Some (moved (World r (votes w) stops (claims w) (parts w) h) r'
          (new_content h b n (says_allow v && negb ask && negb stops && match who with Program => true | _ => false end) (st r')))
      | None => None
      end
  | TimeCame passed =>
      match after (time_came (st r) passed) (Brings 0 0 0) r with
      | Some r' => Some (moved w r' h)
      | None => None
      end
  | TimeEnded expired =>
      match after (time_ended (st r) expired (any (tried r))) (Brings 0 0 0) r with
      | Some r' => Some (moved w r' h)
      | None => None
      end
  | Decide d =>
      let vs := voters (ver r) (votes w) in
      match after (decided (d_decides d) (payload r =? digest r) (d_shown d =? digest r) (st r) (d_version d =? ver r)
                     (d_expired d) (d_asked d) (d_approve d) (d_seen d) (d_admitted d) (d_strong d) (on w) (d_late d)
                     (max (need r) 1 <=? d_count d (d_person d :: vs)) (any (tried r))) (Brings 0 0 0) r with
      | Some r' =>
          let said := d_approve d && d_decides d && d_asked d && d_seen d && negb (d_expired d) && d_strong d && negb (on w) in
          let h' := History (if said then (d_person d, d_version d, d_shown d) :: yes h else yes h) (allowed h) (wanted h)
                      (fresh h || is_some (st r') Approved) (ever h) (doubt h) (open h) (denied h) (outs h) in
          (* It is stored as an approval unless it was a rejection, or came too late. *)
          let stored := d_approve d && (same_version r r' || is_some (st r') Approved) in
          let w' := World r (if stored then (ver r, d_person d) :: votes w else votes w) (on w) (claims w) (parts w) h in
          if same_version r r' then Some (World r' (votes w') (on w) (claims w) (parts w) h')
          else Some (moved w' r' h')
      | None => None
      end
  | Cancel who =>
      match after (cancelled who (st r) (any (tried r))) (Brings 0 0 0) r with
      | Some r' => Some (moved w r' h)
      | None => None
      end
  | Take due judge v n =>
      (* The gate asks policy again only if nobody decided, and no switch stops it. *)
      let judges := judge && ruled r && negb (on w) in
      match after (claimed (st r) due (on w) judges (ruled r) v (any (tried r))) (Brings 0 n 0) r with
      | Some r' =>
          let takes := is_some (st r') Executing in
          let h' := History (yes h) (if judges && negb (says_allow v) then None else allowed h)
                      (if is_some (st r') Pending then n else wanted h) (fresh h) (ever h) (doubt h)
                      (if takes then ver r' :: open h else open h) (denied h) (outs h) in
          Some (moved (World r (votes w) (on w) (if takes then Claim (ver r') (payload r') (digest r') :: claims w else claims w) (parts w) h) r' h')
      | None => None
      end
  | Hold c =>
      match after (held (st r) (c_ver c =? ver r)) (Brings 0 0 0) r with
      | Some r' => Some (World r' (votes w) (on w) (claims w) (parts w) h)
      | None => None
      end
  | Begin c n =>
      (* An executor is called only with bytes that are those which were approved. *)
      match intact (c_payload c =? c_digest c), after (begun (st r) (c_ver c =? ver r) (halted r) (on w)) (Brings 0 0 0) r,
            part_begins (asked (parts w n)) (pst (parts w n)) with
      | Moves _ _, Some r', PMoves s q more =>
          let p := part_after (PMoves s q more) (parts w n) in
          Some (World r' (votes w) (on w) (claims w) (fun m => if m =? n then p else parts w m)
            (History (yes h) (allowed h) (wanted h) (fresh h) (ever h) (doubt h) (open h) (denied h)
               (fun m => if m =? n then attempts p :: outs h n else outs h m)))
      | _, _, _ => None
      end
  | Result n attempt to =>
      let p := parts w n in
      match part_ends (attempt =? attempts p) (asked p) (pst p) to with
      | PRefused => None
      | a => Some (World r (votes w) (on w) (claims w) (fun m => if m =? n then part_after a p else parts w m)
          (History (yes h) (allowed h) (wanted h) (fresh h) (ever h) (doubt h) (open h) (denied h)
             (fun m => if m =? n then
                match to with
                | PDelivered => [attempt]          (* the executor knows that it happened *)
                | PSending | PUncertain => outs h n
                | _ => remove Nat.eq_dec attempt (outs h n) (* it is certain that it did not *)
                end
              else outs h m)))
      end
  | End version gone ours to free =>
      match after (ended (st r) (version =? ver r) ours to free (halted r) (on w) (tries_of (tried r))) (Brings 0 0 0) r with
      | Some r' =>
          let ps := if gone then interrupt (parts w) else parts w in
          let h' := History (yes h) (allowed h) (wanted h) (fresh h) (ever h) (doubt h)
                      (* The executor says of this claim that nothing happened that it does not know. *)
                      (match to with Approved => remove Nat.eq_dec version (open h) | _ => open h end) (denied h) (outs h) in
          let w' := World r (votes w) (on w) (claims w) ps h in
          if free && is_some (st r') Approved then Some (World r' (votes w) (on w) (claims w) ps h') else Some (moved w' r' h')
      | None => None
      end
  | SwitchOn =>
      (* What was approved until now counts for nothing any more. *)
      let h' := History (yes h) (allowed h) (wanted h) false (ever h) (doubt h) (open h) (denied h) (outs h) in
      match after (switched (st r) (halted r) (any (tried r))) (Brings 0 0 0) r with
      | Some r' =>
          let w' := World r (votes w) true (claims w) (parts w) h in
          if same_version r r' then Some (World r' (votes w) true (claims w) (parts w) h') else Some (moved w' r' h')
      | None => Some (World r (votes w) true (claims w) (parts w) h')
      end
  | SwitchOff => Some (World r (votes w) false (claims w) (parts w) h)
  | Resolve decides to version changed =>
      match after (resolved decides to (st r) (version =? ver r) (halted r) (on w) changed) (Brings 0 0 0) r with
      | Some r' =>
          let no := match to with Approved => true | _ => false end in
          Some (moved w r' (History (yes h) (allowed h) (wanted h) (fresh h) (ever h) false
                  (if no then [] else open h) (no || denied h) (outs h)))
      | None => None
      end
  | Leave p => Some (World r (filter (fun x => negb (snd x =? p)) (votes w)) (on w) (claims w) (parts w) h)
  | Tamper b =>
      let '(Row s v _ d n u t hl dl) := r in
      Some (World (Row s v b d n u t hl dl) (votes w) (on w) (claims w) (parts w) h)
  | Found x entries record began ends above n v =>
      match after (distrusted entries record began ends (st x) (any (tried x)) (on w) v) (Brings 0 n above) x with
      | Some r' =>
          Some (moved w r' (History (yes h) (allowed h) n (fresh h) (ever h) (is_some (st r') Unknown) (open h) (denied h) (outs h)))
      | None => None
      end
  end.

(* What is assumed of inputs. *)

(* A way to count people is sound if it never counts more than there are. *)
Definition sound (count : list nat -> nat) : Prop :=
  forall l, count l <= length (nodup Nat.eq_dec l).

Definition fair (w : world) (i : input) : Prop :=
  match i with
  | Decide d => sound (d_count d)
  | Result n attempt to => True
  (* Whether its row was found changed is on the record. *)
  | Resolve _ _ _ changed => doubt (past w) = true -> changed = true
  (* A program holds what it claimed. *)
  | Begin c _ | Hold c => In c (claims w)
  (* The record is honest, since its entries are sealed and numbered: it has the action,
     knows whether it was ever executed, and whether it has ended. *)
  | Found _ entries record began ends above n _ =>
      (ver (now w) = 0 -> entries = false) /\
      (1 <= ver (now w) -> entries = true /\ exists s, record = Some s /\ (settled s = true \/ settled (st (now w)) = true -> s = st (now w))) /\
      began = ever (past w) /\ (ends = true -> ever (past w) = true) /\
      ver (now w) <= above /\ wanted (past w) <= n
  | _ => True
  end.

Inductive reach : world -> Prop :=
  | reach_start : reach start
  | reach_step : forall w i w', reach w -> fair w i -> step w i = Some w' -> reach w'.
