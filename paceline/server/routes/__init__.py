"""The endpoints: functions alone, one file a family. `translate` reads their bodies, `answers` writes their answers."""
